"""Where everything of a run lies."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from uuid import uuid4

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.load import LoadedJob, dump_job, load_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir import lock, state
from trainer_backend.rundir.files import append_line, flush, read_lines, replace_lines, replace_text, writing
from trainer_backend.rundir.spool import forget_consumed_after, tidy_spools
from trainer_backend.rundir.state import LOG_FILE

# Of a run directory: jobs and rollouts may hold what other users of the machine are not to read.
OWNERS_ALONE = 0o700
_FOLDERS = ("rollouts", "checkpoints")
# Of fixed policies (rundir.fixed_record); not there in a run without.
FIXED_RECORD = "fixed_policies.json"
_OF_EVERY_START = ("job.toml", "run.json", FIXED_RECORD, lock.FILE, state.STATE_FILE, LOG_FILE)


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """One run's folder.

    Attributes:
        path: the folder.
        run_id: names the run at task apps; unlike the folder's name it is never used twice.
    """

    path: Path
    run_id: str

    @property
    def metrics_file(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def task_app_log(self) -> Path:
        """Of a task app that this run starts itself."""
        return self.path / "task_app.log"

    @property
    def report(self) -> Path:
        return self.path / "report"

    @property
    def rollouts(self) -> Path:
        return self.path / "rollouts"

    def rollouts_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.parquet"

    def iteration_files(self) -> list[Path]:
        """The stored rollouts of training iterations, in no order."""
        return list(self.rollouts.glob("iteration_*.parquet"))

    def spool_file(self, name: str) -> Path:
        """The finished rollouts of an unfinished stage; see `rundir.spool`."""
        return self.rollouts / f"{name}.spool.jsonl"

    def job(self) -> JobConfig:
        """The resolved job that this run was started with."""
        return load_job(self.path / "job.toml").config

    def changed_job(self, overrides: Sequence[str]) -> LoadedJob:
        """The job with some keys changed, for what goes on with the rollouts that are stored.

        Raises:
            JobError: a change that does not fit; or another name, by which the samples of fixed policies
                would be told from the actor's no more.
        """
        loaded, name = load_job(self.path / "job.toml", overrides), self.run_id.rpartition(".")[0]
        if loaded.config.job.name != name:
            raise JobError(
                f"job.name is {loaded.config.job.name!r}, and {self.path} holds rollouts of {name!r}: a run "
                f"keeps its name (a folder may be called anything)"
            )
        return loaded

    def replace_job(self, job: JobConfig) -> None:
        """Write the job that the run goes on with."""
        replace_text(self.path / "job.toml", dump_job(job))

    def append_metrics(self, row: dict[str, Any]) -> None:
        """One JSON line, on disk before this returns.

        Raises:
            RunNotWritten: the disk is full, or refuses.
        """
        append_line(self.metrics_file, row, durable=True)

    def metrics(self) -> list[dict[str, Any]]:
        """All rows, oldest first. A line cut short by a crash is left out."""
        return read_lines(self.metrics_file)

    def lost_rows(self, iteration: int) -> str | None:
        """A sentence, where iterations up to this one have no row: each had left one before it was saved."""
        there = {row.get("iteration") for row in self.metrics() if row.get("kind") == "iteration"}
        lost = [number for number in range(1, iteration + 1) if number not in there]
        if not lost:
            return None
        return (
            f"{self.metrics_file} has lost the rows of {len(lost)} of {iteration} iterations, the first of "
            f"iteration {lost[0]}: charts, the report and a schedule that looks back go without them; "
            f"checkpoints/best stays where it is until an evaluation is better"
        )

    def go_back_to(self, iteration: int, tell: Callable[[str], None]) -> None:
        """What a run that goes on from the end of an iteration will do again, is not done; -1: all of it.

        Args:
            tell: is given a sentence about rollouts that are there and cannot be used.

        Raises:
            RunNotWritten: the disk is full, or refuses.
        """
        self.forget_after(iteration)
        tidy_spools(self.rollouts, iteration, tell)

    def forget_after(self, iteration: int) -> None:
        """Drop what metrics and ledger say of later iterations."""
        rows = self.metrics()
        kept = [row for row in rows if row.get("iteration", 0) <= iteration]
        if len(kept) < len(rows):
            replace_lines(self.metrics_file, kept, durable=True)
        forget_consumed_after(self.path, iteration)

    def remove_if_unused(self, *, with_log: bool) -> bool:
        """Remove the folder if it holds no more than `create_run` made; whether it is gone.

        Args:
            with_log: also when a task app has logged there; False where that log may explain what went wrong.
        """
        if not all(self._is_unused(path, with_log=with_log) for path in self.path.iterdir()):
            return False
        if lock.holder(self.path) is not None:
            return False  # somebody else goes on with it
        shutil.rmtree(self.path, ignore_errors=True)
        return not self.path.exists()

    def _is_unused(self, path: Path, *, with_log: bool) -> bool:
        if path.name in _FOLDERS:
            return path.is_dir() and not any(path.iterdir())
        if path.name in _OF_EVERY_START or (with_log and path == self.task_app_log):
            return True
        return path in (self.metrics_file, self.task_app_log) and path.stat().st_size == 0


def create_run(job: JobConfig, path: Path | None = None) -> RunDirectory:
    """Make a fresh folder: `path`, or runs_dir/name (name-2, name-3 ... when taken).

    What a killed process has left of a run that it was about to make is no run, and is made anew.

    Raises:
        RunDirectoryError: `path` holds a run already, or cannot be written.
    """
    if path is None:
        path = _free_folder(job.job.runs_dir / job.job.name)
    run = RunDirectory(path, f"{job.job.name}.{uuid4().hex[:12]}")
    with writing(path):
        for folder in (path, *(path / name for name in _FOLDERS)):
            folder.mkdir(OWNERS_ALONE, parents=True, exist_ok=True)
    with lock.locked(path):
        if (path / "run.json").exists():
            raise RunDirectoryError(
                f"{path} holds a run already; `turnwise train --resume {path}` continues it"
            )
        run.replace_job(job)
        # Last: now it is one.
        replace_text(path / "run.json", json.dumps({"run_id": run.run_id, "format": 1}))
        with writing(path):
            flush(path.parent)  # its own name, which stands there
    return run


def _free_folder(base: Path) -> Path:
    """A folder that this call has made: `base`, or base-2, base-3 ... when taken.

    Made rather than looked for, so that two runs that start together get one each.
    """
    with writing(base):
        for number in count(1):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            try:
                path.mkdir(OWNERS_ALONE, parents=True)
            except FileExistsError:
                continue
            return path
    raise AssertionError("the numbers do not end")


def open_run(path: Path) -> RunDirectory:
    """A run that exists.

    Raises:
        RunDirectoryError: there is none in `path`, or a version of Turnwise that is not this one made it.
    """
    try:
        facts = json.loads((path / "run.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunDirectoryError(f"{path} holds no run (no run.json in it)") from error
    except (OSError, ValueError) as error:
        raise RunDirectoryError(f"{path}/run.json cannot be read: {error}") from error
    if not isinstance(facts, dict) or "run_id" not in facts:
        raise RunDirectoryError(f"{path}/run.json names no run_id")
    if facts.get("format") != 1:
        raise RunDirectoryError(f"{path} was written in format {facts.get('format')!r}; this version reads 1")
    return RunDirectory(path, str(facts["run_id"]))
