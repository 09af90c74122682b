"""Plays an iteration of configs/crafter_cpu.toml, for scripts that measure a part of it."""

import asyncio
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import kit
from shared_schemas.rollouts import Rollout
from trainer_backend.credit.credit import Measured
from trainer_backend.credit.recredit import stored_measured
from trainer_backend.job.load import load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.layout import create_run
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.start import run_job

JOB = kit.ROOT / "configs" / "crafter_cpu.toml"
# A shorter warm-up keeps the length of episodes, and the kind of prompts and answers. Unlike in the job's
# first two iterations, the critic does not learn alone, since most iterations train the policy too.
SETTINGS = (
    "training.iterations=1", "evaluation.instances=8", "warmup.episodes=60", "warmup.epochs=1",
    "training.critic_warmup=0",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Played:
    """An iteration of a finished run.

    measured: the critic's values by which the rollouts were credited.
    row: the iteration's line of metrics.jsonl.
    cpu_s: CPU seconds of the trainer's process, from the end of the evaluation before the iteration to this
        line; a task app in another process is not included.
    """

    job: JobConfig
    rollouts: list[Rollout]
    measured: Measured
    row: dict[str, Any]
    cpu_s: float


# For a script's --quick: an iteration of 40 decisions, to see that it works.
QUICK = ("rollout.episodes_per_batch=8", "rollout.max_turns=5", "warmup.episodes=8")


class Watching(kit.Reporter):
    """A reporter that reads the process's CPU clock at each row."""

    def __init__(self) -> None:
        self.took_s = self._looked_at = 0.0

    def metrics(self, row: dict[str, Any], line: str) -> None:
        """Note the CPU seconds since the previous row, which is that of an evaluation."""
        now = time.process_time()
        if row["kind"] == "iteration":
            self.took_s = now - self._looked_at
        self._looked_at = now


def played(settings: Sequence[str] = ()) -> Played:
    """Play, credit and train one iteration of the job, in a temporary folder."""
    with tempfile.TemporaryDirectory() as folder:
        return played_in(Path(folder) / "run", settings)


def played_in(folder: Path, settings: Sequence[str] = ()) -> Played:
    """Do the same as `played` in a folder that stays."""
    job = load_job(JOB, (*SETTINGS, *settings)).config
    directory, watching = create_run(job, folder), Watching()
    asyncio.run(run_job(job, directory, watching, resume=False))
    (row,) = (row for row in directory.metrics() if row["kind"] == "iteration")
    rollouts = read_rollouts(directory.rollouts_file("iteration_1"))
    (measured,) = stored_measured(directory, (1,))
    return Played(job, rollouts, measured, row, watching.took_s)
