"""The files of a run directory: their paths, and how a run is created, opened and rewound."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.rundir import lock, state
from trainer_backend.rundir.checkpoint_paths import latest_checkpoint, read_iteration
from trainer_backend.rundir.files import (
    append_line,
    flush,
    read_lines,
    replace_lines,
    replace_text,
    write_errors,
)
from trainer_backend.rundir.spool import SPOOL_ENDING, cut_ledger, read_stage, tidy_spools
from trainer_backend.rundir.state import LOG_FILE

# Importing the job's schema takes a third of the start-up time of a command that only reads a run. So only
# methods that use a job import it.
if TYPE_CHECKING:
    from trainer_backend.job.load import LoadedJob
    from trainer_backend.job.schema import JobConfig

# `kind` of the metrics row of a stage that ended the run. A resumed run drops the row and repeats the stage.
_ENDED_RUN = "lost"

# The mode of a run directory: other users of the machine must not read its jobs and rollouts.
OWNERS_ALONE = 0o700
_FOLDERS = ("rollouts", "checkpoints")
# The record of fixed policies (rundir.fixed_record); runs without them have no such file.
FIXED_RECORD = "fixed_policies.json"
# The record of data-set rows (rundir.data_record); runs without [data] have no such file.
DATA_RECORD = "data.parquet"
# Marks a run whose rollouts `turnwise import` wrote.
_IMPORTED = "imported"
_OF_EVERY_START = ("job.toml", "run.json", FIXED_RECORD, DATA_RECORD, lock.FILE, state.STATE_FILE, LOG_FILE)


class _Inside:
    """A property of a RunDirectory: the path of one of the run's files or folders."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", kind: "type[RunDirectory]") -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    run_id: str
    """Identifies the run at task apps. Unlike the folder's name, it is unique."""

    metrics_file = _Inside("metrics.jsonl")
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights")
    """The two newest versions of the policy as model folders, for servers that load them."""
    task_app_log = _Inside("task_app.log")
    """The log of the task app that the run started; if it started several, the log of the first."""
    learner_log = _Inside("learner.log")
    report = _Inside("report")
    recredit = _Inside("recredit")
    """The default output folder of `turnwise recredit`."""
    rollouts = _Inside("rollouts")

    def gateway_log(self, number: int) -> Path:
        return self.path / f"gateway_{number}.log"

    def vllm_log(self, number: int) -> Path:
        return self.path / f"vllm_{number}.log"

    def rejected_file(self, stage: str) -> Path:
        """Return the path of the file with a stage's rejected rollouts, which training cannot use."""
        return self.rollouts / f"{stage}.rejected.jsonl"

    def rollouts_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.parquet"

    def curriculum_file(self, iteration: int) -> Path:
        return self.path / "curriculum" / f"iteration_{iteration}.jsonl"

    def iteration_files(self) -> list[Path]:
        """List the rollout files of training iterations, unordered."""
        return list(self.rollouts.glob("iteration_*.parquet"))

    def iterations(self) -> dict[int, Path]:
        """Return the rollout files of training iterations by iteration, in order."""
        files = {int(path.stem.removeprefix("iteration_")): path for path in self.iteration_files()}
        return dict(sorted(files.items()))

    def remove_spools(self, iteration: int) -> None:
        """Delete the spools of the iterations up to this one, and of the stages before RL."""
        for path in self.rollouts.glob(f"*{SPOOL_ENDING}"):
            stage, number = read_stage(path)
            if not stage or (stage == "iteration" and 0 <= number <= iteration):
                with write_errors(path):
                    path.unlink(missing_ok=True)

    def spool_file(self, name: str) -> Path:
        """Return the spool file of a stage; see `rundir.spool`."""
        return self.rollouts / f"{name}{SPOOL_ENDING}"

    def has_played(self) -> bool:
        """Return whether any rollout or checkpoint is stored."""
        return any(self.rollouts.glob("*")) or any(self.checkpoints.glob("*"))

    def job(self) -> "JobConfig":
        """Read the resolved job of this run, without running code that the job names."""
        from trainer_backend.job.load import load_job

        return load_job(self.path / "job.toml", runs_plugins=False).config

    def job_with(self, overrides: Sequence[str]) -> "LoadedJob":
        """Read the job with overrides, and load all code that it names, so that rollouts can be played."""
        from trainer_backend.job.code_files import with_known_files

        if (self.path / _IMPORTED).exists():
            raise RunDirectoryError(
                f"{self.path} holds captures that were imported, and nothing that could be played on"
            )
        return with_known_files(self.job_of_stored(overrides))

    def job_of_stored(self, overrides: Sequence[str]) -> "LoadedJob":
        """Read the job with overrides, to credit stored rollouts. Code files of task apps may be missing."""
        from trainer_backend.job.load import load_job

        loaded, name = load_job(self.path / "job.toml", overrides), self.run_id.rpartition(".")[0]
        if loaded.config.job.name != name:
            raise JobError(
                f"job.name is {loaded.config.job.name!r}, and {self.path} holds rollouts of {name!r}: a run "
                f"keeps its name (a folder may be called anything)"
            )
        return loaded

    def mark_as_imported(self) -> None:
        """Mark the run as imported, so that no resume trains over its rollouts."""
        replace_text(self.path / _IMPORTED, "")

    def replace_job(self, job: "JobConfig") -> None:
        from trainer_backend.job.load import dump_job

        replace_text(self.path / "job.toml", dump_job(job))

    def append_metrics(self, row: dict[str, Any]) -> None:
        append_line(self.metrics_file, row, durable=True)

    def append_last_stage(self, row: dict[str, Any]) -> None:
        """Append the metrics row of a stage that ended the run. A resume removes the row."""
        self.append_metrics({"kind": _ENDED_RUN, **row})

    def metrics(self) -> list[dict[str, Any]]:
        """Read all rows of metrics.jsonl, oldest first. Skip a line that a crash cut short."""
        return read_lines(self.metrics_file)

    def is_finished(self, iterations: int) -> bool:
        """Return whether the run has ended after at least `iterations`, so that no start has work left."""
        status, newest = state.read_status(self.path), latest_checkpoint(self.checkpoints)
        if status.holder is not None or status.state is None or status.state.state != "ended" or not newest:
            return False
        evaluations = {row["iteration"] for row in self.metrics() if row["kind"] == "evaluation"}
        return read_iteration(newest) >= iterations and read_iteration(newest) in evaluations

    def missing_rows(self, iteration: int) -> str | None:
        """Describe the rows of metrics that are missing up to this iteration; None if none is missing."""
        present = {row.get("iteration") for row in self.metrics() if row.get("kind") == "iteration"}
        missing = [number for number in range(1, iteration + 1) if number not in present]
        if not missing:
            return None
        return (
            f"{self.metrics_file} has lost the rows of {len(missing)} of {iteration} iterations, the first "
            f"of iteration {missing[0]}: charts, the report and a schedule that looks back lack them; "
            f"checkpoints/best stays where it is until an evaluation is better"
        )

    def go_back_to(
        self, iteration: int, tell: Callable[[str], None], *, policy_version: int | None = None
    ) -> None:
        """Remove what was recorded after an iteration, so that a resumed run can repeat it; -1: remove all.

        For `policy_version` see `tidy_spools`.
        """
        self.forget_after(iteration)
        for path in self.path.glob("curriculum/iteration_*.jsonl"):
            if int(path.stem.removeprefix("iteration_")) > iteration:
                with write_errors(path):
                    path.unlink()
        tidy_spools(self.rollouts, iteration, tell, policy_version=policy_version)

    def forget_after(self, iteration: int) -> None:
        """Remove lines of later iterations, and of a stage that ended the run, from metrics and ledger."""
        rows = self.metrics()
        rest = [row for row in rows if row.get("iteration", 0) <= iteration and row.get("kind") != _ENDED_RUN]
        if len(rest) < len(rows):
            replace_lines(self.metrics_file, rest, durable=True)
        cut_ledger(self.path, iteration)

    def remove_if_unused(self, *, with_log: bool) -> bool:
        """Delete the folder if it contains only files that every start writes; return whether it is gone.

        The log of a child process may explain a failure. So a folder with a log that is not empty is deleted
        only if `with_log` is true.
        """
        if not all(self._is_unused(path, with_log=with_log) for path in self.path.iterdir()):
            return False
        if lock.holder(self.path) is not None:
            return False  # another process continues the run
        shutil.rmtree(self.path, ignore_errors=True)
        return not self.path.exists()

    def _is_unused(self, path: Path, *, with_log: bool) -> bool:
        if path.name in _FOLDERS:
            return path.is_dir() and not any(path.iterdir())
        logs = (self.task_app_log, *self.path.glob("task_app_*.log"), self.learner_log)
        if path.name in _OF_EVERY_START or (with_log and path in logs):
            return True
        return path in (self.metrics_file, *logs) and path.stat().st_size == 0


def create_run(job: "JobConfig", path: Path | None = None) -> RunDirectory:
    """Create a run directory: `path`, or runs_dir/name (name-2, name-3 ... if taken).

    `path` may be a folder that a killed process left without run.json.
    """
    from trainer_backend.job.code_files import with_files_of_now

    job = with_files_of_now(job)  # a posted job may have waited since it was read
    if path is None:
        path = _free_folder(job.job.runs_dir / job.job.name)
    run = RunDirectory(path, f"{job.job.name}.{uuid4().hex[:12]}")
    with write_errors(path):
        for folder in (path, *(path / name for name in _FOLDERS)):
            folder.mkdir(OWNERS_ALONE, parents=True, exist_ok=True)
    with lock.run_lock(path):
        if (path / "run.json").exists():
            raise RunDirectoryError(
                f"{path} holds a run already; `turnwise train --resume {path}` continues it"
            )
        run.replace_job(job)
        # Last, because run.json makes the folder a run.
        replace_text(path / "run.json", json.dumps({"run_id": run.run_id, "format": 1}))
        with write_errors(path):
            flush(path.parent)  # so that the folder's name is on disk
    return run


def _free_folder(base: Path) -> Path:
    """Create `base`, or base-2, base-3 ... if taken; runs that start together get different folders."""
    with write_errors(base):
        for number in count(1):
            path = base if number == 1 else base.with_name(f"{base.name}-{number}")
            try:
                path.mkdir(OWNERS_ALONE, parents=True)
            except FileExistsError:
                continue
            return path
    raise AssertionError("the numbers do not end")


def open_run(path: Path) -> RunDirectory:
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
