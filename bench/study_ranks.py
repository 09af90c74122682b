"""A learner of several ranks beside one process, and what happens when a rank fails.

    python -m bench.study_ranks            (make study-ranks)

bench/rank_judge.py compares gradients, a whole update and a resume on another number of ranks, on 2 and on
3 ranks. Then groups of two ranks lose one in the middle of an update, in three
ways: killed, standing still, out of memory. bench/results/ranks.json
has the figures; exit code 1 when one does not hold.
"""

import json
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from bench import kit
from bench.rank_judge import episodes, job_of, tiny_model
from service_kit.own_process import READY
from trainer_backend.errors import LearnerLost, OutOfMemory, TrainerError
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.calls import LEARNER_KEY
from trainer_backend.models.folder import save_model_folder
from trainer_backend.parts import Learner, Progress
from trainer_backend.processes.learner_process import LearnerConnection, remote_learner

LIMITS = {
    "gradient": 1e-6, "metrics": 1e-9, "cosines": 1e-6, "cosines_of_copies": 1e-6, "update": 1e-5,
    "weights": 1e-6, "low": 0.0, "logprobs": 1e-5,
}  # fmt: skip
REPEATS, TIMEOUT_S = 3, 5.0
RESULTS = kit.ROOT / "bench/results/ranks.json"


class Group:
    """A learner of two ranks, opened with a job, as a factory."""

    def __init__(self, job: JobConfig, folder: Path) -> None:
        command = (
            sys.executable,
            "-m",
            "trainer_backend.learner.group",
            "--standalone",
            "--nproc-per-node=2",
        )
        self.log = folder / "learner.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
                env={**os.environ, LEARNER_KEY: "key"},
            )  # fmt: skip
        assert self.process.stdout is not None
        url = next(line for line in self.process.stdout if line.startswith(READY)).removeprefix(READY).strip()
        self.connection = LearnerConnection(url, "key", silence_s=120, log_file=self.log, session="study/1")
        self.connection.ask("open", dump_job(job))
        self.learner = remote_learner(self.connection.ask)

    def fresh(self, prompts: Any, tokenizer_of: Path | None) -> Learner:
        self.connection.ask("fresh", prompts, tokenizer_of)
        return self.learner

    def resumed(self, checkpoint: Path) -> tuple[Learner, Progress]:
        return self.learner, self.connection.ask("resumed", checkpoint)

    def rank(self, number: int) -> psutil.Process:
        ranks = psutil.Process(self.process.pid).children()
        return next(rank for rank in ranks if rank.environ().get("RANK") == str(number))

    def end(self) -> None:
        self.connection.close()
        with self.process:  # closes its pipes
            self.process.kill()


def judged(count: int, *cases: str) -> dict[str, dict[str, float]]:
    """Differences between `count` ranks and one, by case; without names, of all of them."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        command = (sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={count}")
        subprocess.run(
            [*command, "-m", "bench.rank_judge", str(out), *cases], check=True, stderr=subprocess.DEVNULL
        )
        found: dict[str, dict[str, float]] = json.loads(out.read_text(encoding="utf-8"))
    return found


def after_a_fault(fault: Callable[[psutil.Process], None], timeout_s: float) -> dict[str, Any]:
    """Give rank 1 a fault amid an update; how long the call and the other rank then go on."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        save_model_folder(folder / "model", *tiny_model())
        training = {"update_passes": 400, "batch_decisions": 1000}
        tables = {"learner": {"nproc_per_node": 2, "timeout_s": timeout_s}, "training": training}
        group = Group(job_of({"cluster": {}, **tables}, model={"path": str(folder / "model")}), folder)
        group.fresh([], None)
        first = group.rank(0)
        ended: dict[str, Any] = {}

        def update() -> None:
            try:
                group.learner.update(episodes(), iteration=1)
            except TrainerError as error:
                ended["error"] = type(error).__name__
            ended["call_s"] = time.monotonic()

        thread = threading.Thread(target=update)
        thread.start()
        time.sleep(2.0)  # amid its steps
        began = time.monotonic()
        fault(group.rank(1))
        psutil.wait_procs([first], timeout=120)
        others_s = time.monotonic() - began
        thread.join()
        group.end()
        return {"error": ended["error"], "call_s": ended["call_s"] - began, "others_s": others_s}


def without_memory(rank: psutil.Process) -> None:
    """No more address space than it has now."""
    rank.rlimit(resource.RLIMIT_AS, (rank.memory_info().vms, resource.RLIM_INFINITY))


FAULTS: dict[str, tuple[Callable[[psutil.Process], None], float, str]] = {
    "killed": (lambda rank: rank.send_signal(signal.SIGKILL), 120.0, LearnerLost.__name__),
    "stands still": (lambda rank: rank.send_signal(signal.SIGSTOP), TIMEOUT_S, LearnerLost.__name__),
    "out of memory": (without_memory, 120.0, OutOfMemory.__name__),
}
MOST_S = {"killed": 1.0, "stands still": TIMEOUT_S + 5.0, "out of memory": 30.0}


def main() -> int:
    held = 0
    found: dict[str, Any] = {"ranks": {}, "faults": {}}
    for count in (2, 3):
        found["ranks"][count] = cases = judged(count)
        for figure, limit in LIMITS.items():
            worst = max(case[figure] for case in cases.values() if figure in case)
            held |= kit.report(
                f"{count} ranks, {figure}: {worst:.1e} at most, limit {limit:g}", worst <= limit
            )
        held |= kit.report(f"{count} ranks, choices after a resume", cases["resume"]["choices_equal"] == 1.0)
        publish = cases["publish"]
        held |= kit.report(
            f"{count} ranks, a publish: {publish['extra_mib']:.0f} MiB extra, of {publish['limit_mib']:.0f}",
            publish["extra_mib"] <= publish["limit_mib"],
        )
    for name, (fault, timeout_s, expected) in FAULTS.items():
        runs = [after_a_fault(fault, timeout_s) for _ in range(REPEATS)]
        middle = statistics.median(run["others_s"] for run in runs)
        found["faults"][name] = runs
        kinds = {run["error"] for run in runs}
        held |= kit.report(
            f"a rank {name}: {middle:.2f} s (median of {REPEATS}) until the other ended; the call: {kinds}",
            middle <= MOST_S[name] and kinds == {expected},
        )
    RESULTS.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    return held


if __name__ == "__main__":
    sys.exit(main())
