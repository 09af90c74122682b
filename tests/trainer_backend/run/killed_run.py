"""A whole run on stand-ins for model, engine and task app, in processes that end at a chosen write.

Its weights are a digest of all that they learned from, in order, and what is played depends on them: so a
rollout that is used twice, or not, or of other weights, or in another order shows in the last weights.
"""

import asyncio
import gc
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from hashlib import blake2b
from pathlib import Path
from typing import Any

from shared_schemas.rollouts import Rollout, RolloutRequest
from tests.conftest import ListReporter, tiny_job
from tests.trainer_backend.pages.hand_made import COW, WOOD
from tests.trainer_backend.test_train import Server, finished
from trainer_backend import job_parts
from trainer_backend.collect.batch import Batch
from trainer_backend.collect.dispatcher import Keep
from trainer_backend.core.segments import Segment
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.checkpointing import Saving
from trainer_backend.run.reporters import RecordingReporter
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import create_run, open_run
from trainer_backend.rundir.lock import run_lock
from trainer_backend.train import Run, train

ITERATIONS = 2


def digest(*parts: object) -> str:
    return blake2b(json.dumps(parts).encode(), digest_size=8).hexdigest()


def locate(rollout_id: str) -> str:
    """Without the id of the start."""
    return rollout_id.partition("/")[2]


class Learner:
    def __init__(self, weights: str) -> None:
        self.weights = weights

    def warm_up(self, episodes: object, tell: object) -> dict[str, float]:
        raise AssertionError

    def values(self, episodes: Mapping[str, Sequence[Segment]]) -> Any:
        raise AssertionError

    score = values

    def update(
        self, episodes: Sequence[CreditedEpisode], *, iteration: int, policy_version: int | None = None
    ) -> dict[str, float]:
        for item in episodes:
            assert not isinstance(item.advantages, tuple)
            self.weights = digest(self.weights, locate(item.rollout_id), list(map(float, item.advantages)))
        return {"optim/steps": 1.0, "optim/steps_skipped": 0.0}

    def save(self, folder: Path, progress: Progress) -> None:
        aside = folder.with_name(f".{folder.name}.tmp")
        with write_errors(folder):
            aside.mkdir(exist_ok=True)
            (aside / "weights.json").write_text(json.dumps(self.weights))
            (aside / "state.json").write_text(json.dumps(asdict(progress)))
            aside.rename(folder)


class Dispatcher:
    """Plays what the weights of now would play; a line of `told` for each that was kept, and for each ask.

    What is held in memory, while the checkpoint of its weights is being written, is not kept yet.
    """

    def __init__(self, learner: Learner, told: Path) -> None:
        self._learner, self._told = learner, told

    async def collect(
        self, requests: Sequence[RolloutRequest], progress: object = None, keep: Keep | None = None
    ) -> Batch:
        found = []
        for request in reversed(requests):  # in another order than they are used in
            self._tell("asked", request)
            rollout = self._played(request)
            if keep is not None:
                keep(rollout)
                if self._is_on_disk(rollout):
                    self._tell("kept", request)
            found.append(rollout)
        return Batch(tuple(sorted(found, key=lambda item: (item.group_id, item.sibling))))

    async def ack(self, run_id: str, rollouts: Sequence[Rollout]) -> None: ...

    def _played(self, request: RolloutRequest) -> Rollout:
        draw = int(digest(self._learner.weights, locate(request.rollout_id), request.start.seed), 16)
        return finished(request, [WOOD if draw % 2 else (), COW if draw % 3 else ()])

    def _is_on_disk(self, rollout: Rollout) -> bool:
        for path in (self._told.parent / "run/rollouts").glob("*.spool.jsonl"):
            with suppress(FileNotFoundError):  # it is of an earlier iteration, whose checkpoint is there now
                if rollout.rollout_id in path.read_text():
                    return True
        return False

    def _tell(self, what: str, request: RolloutRequest) -> None:
        with self._told.open("a") as file:
            file.write(f"{what} {locate(request.rollout_id)}\n")


def start(folder: Path, *, kill_at: int | None = None, **settings: Any) -> None:
    """Begin or continue the run in `folder`, as `run_job` does; its files are next to `told.txt`.

    Args:
        kill_at: SIGKILL just before the n-th time that a file of the run is opened for writing, renamed or
            removed, from 0; absent: to its end. How many there were stands in `writes.txt`.
    """
    gc.freeze()  # each iteration collects garbage: not among the imports, whose memory a fork shares
    resumed = (folder / "run" / "run.json").exists()
    job = tiny_job(
        training__iterations=ITERATIONS, training__group_size=2, rollout__episodes_per_batch=4,
        training__step_rewards_mode="off", evaluation__instances=2, evaluation__every_n_iters=2, **settings,
    )  # fmt: skip
    directory = open_run(folder / "run") if resumed else create_run(job, folder / "run")
    writes = Writes(directory.path, kill_at)
    sys.addaudithook(writes.heard)
    with run_lock(directory.path), RecordingReporter.opened(directory, ListReporter()) as reporter:
        checkpoint = latest_checkpoint(directory.checkpoints)
        learner, progress = Learner("fresh"), Progress()
        if checkpoint is not None:
            learner = Learner(json.loads((checkpoint / "weights.json").read_text()))
            progress = Progress(**json.loads((checkpoint / "state.json").read_text()))
        directory.go_back_to(-1 if checkpoint is None else progress.iteration, reporter.say)
        run_id = f"{directory.run_id}.{os.getpid()}"
        dispatcher: Any = Dispatcher(learner, folder / "told.txt")
        run = Run(
            job_parts.planner(job, run_id, Server.inference), job_parts.credit(job), dispatcher, Server(),
            saving=Saving(job.training, job.evaluation, directory, learner), reporter=reporter,
            resumes=reporter.resumes,
        )  # fmt: skip
        asyncio.run(train(run, progress, asyncio.Event()))
        reporter.end("ended")
    (folder / "writes.txt").write_text(str(writes.count))


class Writes:
    """Counts the writes to a folder by Python's own audit events, which no code under test knows of."""

    def __init__(self, folder: Path, kill_at: int | None) -> None:
        self._folder, self._kill_at, self.count = str(folder), kill_at, 0

    def heard(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate"):
            return
        if not str(arguments[0]).startswith(self._folder):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if self.count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        self.count += 1
