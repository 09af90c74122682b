"""`python -m tests.trainer_backend.jobs.acting_job RUN_DIRECTORY`: plays a job's process, without training.

It keeps to what a service may expect of one: the lock, state.json, metrics.jsonl, run.log, SIGTERM, exit
codes, its end when its standard input closes. What it plays is the job's name, `waiting` for any other; `go`
and `iterate` in its run directory, which a test makes, let it go on.
"""

import itertools
import os
import signal
import sys
import threading
import time
from pathlib import Path

from service_kit.own_process import end_with_parent
from trainer_backend.rundir.lock import run_lock
from trainer_backend.rundir.state import (
    DONE,
    REFUSED,
    STOPPED,
    RunState,
    StateName,
    append_log,
    read_state,
    write_state,
)

LOOK_S = 0.01


class Actor:
    def __init__(self, folder: Path, stopped: threading.Event) -> None:
        self.folder, self.stopped = folder, stopped
        before = read_state(folder)
        self.iteration = before.iteration if before is not None else 0
        self.starts = before.starts + 1 if before is not None else 1

    def say(self, state: StateName, *, code: str = "", detail: str = "", stage: str = "") -> None:
        write_state(
            self.folder,
            RunState(
                state,
                os.getpid(),
                iteration=self.iteration,
                stage=stage,
                code=code,
                detail=detail,
                since="2026-11-21T12:00:00.000+00:00",
                starts=self.starts,
            ),
        )

    def iterate(self) -> None:
        self.iteration += 1
        row = (
            f'{{"kind": "iteration", "iteration": {self.iteration}, "decision/nonzero_frac": 0.25, '
            f'"episode/outcome_reward": {self.iteration}.5, "policy/version": {self.iteration}}}\n'
        )
        with (self.folder / "metrics.jsonl").open("a") as file:
            file.write(row)
        append_log(self.folder, f"iteration {self.iteration}")
        self.say("training", stage=f"collect {self.iteration + 1}")

    def stop(self) -> int:
        self.say("stopped")
        return STOPPED

    def done(self) -> int:
        self.say("ended")
        return DONE


def quick(actor: Actor) -> int:
    """Two iterations, and the end."""
    actor.iterate()
    actor.iterate()
    return actor.done()


def waiting(actor: Actor) -> int:
    """An iteration for each `iterate`, the end with `go`."""
    actor.say("training")
    while not actor.stopped.is_set():
        if (actor.folder / "go").exists():
            return actor.done()
        if (actor.folder / "iterate").exists():
            (actor.folder / "iterate").unlink()
            actor.iterate()
        time.sleep(LOOK_S)
    return actor.stop()


def stubborn(actor: Actor) -> int:
    """Does not heed SIGTERM."""
    actor.say("training")
    while True:
        time.sleep(LOOK_S)


def crashing(actor: Actor) -> int:
    """Dies at once in its first two starts; then as `waiting`."""
    if actor.starts <= 2:
        actor.say("training")
        os.kill(os.getpid(), signal.SIGKILL)
    return waiting(actor)


def refused(actor: Actor) -> int:
    actor.say("failed", code="job_invalid", detail="model.path holds no model")
    return REFUSED


def mute(actor: Actor) -> int:
    """Is refused before it could write a state."""
    (actor.folder / "state.json").unlink()
    print("a line of before\nerror: sinks.wandb cannot be opened", file=sys.stderr)
    return REFUSED


def main(folder: Path) -> int:
    end_with_parent()
    stopped = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stopped.set())
    plays = {play.__name__: play for play in (quick, waiting, stubborn, crashing, refused, mute)}
    with run_lock(folder):
        actor = Actor(folder, stopped)
        actor.say("starting")
        append_log(folder, f"start {actor.starts}")
        return plays.get("".join(itertools.takewhile(str.isalpha, folder.name)), waiting)(actor)


if __name__ == "__main__":
    raise SystemExit(main(Path(sys.argv[1])))
