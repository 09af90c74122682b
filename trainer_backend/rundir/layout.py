"""The paths of everything in a run directory."""

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

# A job's schema takes a third of the start of a command that only reads what a run has stored; the methods
# that read or write a job import it.
if TYPE_CHECKING:
    from trainer_backend.job.load import LoadedJob
    from trainer_backend.job.schema import JobConfig

# The kind of the row of a stage that ended the run. A resumed run plays the stage again, and drops it.
_ENDED_RUN = "lost"

# The mode of a run directory: other users of the machine must not read its jobs and rollouts.
OWNERS_ALONE = 0o700
_FOLDERS = ("rollouts", "checkpoints")
# The record of fixed policies (run.fixed_policies); runs without them have no such file.
FIXED_RECORD = "fixed_policies.json"
# The rows that a run began with (rundir.data_record); runs without [data] have no such file.
DATA_RECORD = "data.parquet"
# Marks a run whose rollouts `turnwise import` wrote.
_IMPORTED = "imported"
_OF_EVERY_START = ("job.toml", "run.json", FIXED_RECORD, DATA_RECORD, lock.FILE, state.STATE_FILE, LOG_FILE)


class _Inside:
    """A property: the path of a file or folder of a run."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, run: "RunDirectory", kind: "type[RunDirectory]") -> Path:
        return run.path / self._name


@dataclass(frozen=True, slots=True)
class RunDirectory:
    path: Path
    run_id: str
    """The run's name at task apps; unlike the folder's name it is never used twice."""

    metrics_file = _Inside("metrics.jsonl")
    checkpoints = _Inside("checkpoints")
    weights = _Inside("weights")
    """Versions of the policy as model folders, for servers that load them; the newest two."""
    task_app_log = _Inside("task_app.log")
    """The log of a task app that this run starts itself; of several, the first one's."""
    learner_log = _Inside("learner.log")
    report = _Inside("report")
    recredit = _Inside("recredit")
    """What `turnwise recredit` writes, unless another folder is named."""
    rollouts = _Inside("rollouts")

    def gateway_log(self, number: int) -> Path:
        return self.path / f"gateway_{number}.log"

    def vllm_log(self, number: int) -> Path:
        """The log of a vLLM server that this run starts itself, counted from 0."""
        return self.path / f"vllm_{number}.log"

    def rejected_file(self, stage: str) -> Path:
        """The rollouts of a stage that its credit or update rejected, a line each."""
        return self.rollouts / f"{stage}.rejected.jsonl"

    def rollouts_file(self, name: str) -> Path:
        return self.rollouts / f"{name}.parquet"

    def curriculum_file(self, iteration: int) -> Path:
        """The snapshots that an iteration of training adds to the starts of later ones."""
        return self.path / "curriculum" / f"iteration_{iteration}.jsonl"

    def iteration_files(self) -> list[Path]:
        """List the stored rollouts of training iterations, unordered."""
        return list(self.rollouts.glob("iteration_*.parquet"))

    def iterations(self) -> dict[int, Path]:
        """The stored rollouts of training by the number of their iteration, in order."""
        files = {int(path.stem.removeprefix("iteration_")): path for path in self.iteration_files()}
        return dict(sorted(files.items()))

    def remove_spools(self, iteration: int) -> None:
        """Delete the spools of what the weights of an iteration have learned from, before RL too."""
        for path in self.rollouts.glob(f"*{SPOOL_ENDING}"):
            stage, number = read_stage(path)
            if not stage or (stage == "iteration" and 0 <= number <= iteration):
                with write_errors(path):
                    path.unlink(missing_ok=True)

    def spool_file(self, name: str) -> Path:
        """The spool of an unfinished stage; see `rundir.spool`."""
        return self.rollouts / f"{name}{SPOOL_ENDING}"

    def has_played(self) -> bool:
        """Whether any rollout or checkpoint is stored."""
        return any(self.rollouts.glob("*")) or any(self.checkpoints.glob("*"))

    def job(self) -> "JobConfig":
        """Read the resolved job of this run; no code that the job names runs, as a reader needs none."""
        from trainer_backend.job.load import load_job

        return load_job(self.path / "job.toml", runs_plugins=False).config

    def job_with(self, overrides: Sequence[str]) -> "LoadedJob":
        """Read the job with some keys changed, to play on with all its code: a resume, the truth."""
        from trainer_backend.job.code_files import with_known_files

        if (self.path / _IMPORTED).exists():
            raise RunDirectoryError(
                f"{self.path} holds captures that were imported, and nothing that could be played on"
            )
        return with_known_files(self.job_of_stored(overrides))

    def job_of_stored(self, overrides: Sequence[str]) -> "LoadedJob":
        """Read the same to credit stored rollouts, without a task app that has its files."""
        from trainer_backend.job.load import load_job

        loaded, name = load_job(self.path / "job.toml", overrides), self.run_id.rpartition(".")[0]
        if loaded.config.job.name != name:
            raise JobError(
                f"job.name is {loaded.config.job.name!r}, and {self.path} holds rollouts of {name!r}: a run "
                f"keeps its name (a folder may be called anything)"
            )
        return loaded

    def mark_as_imported(self) -> None:
        """Keep a resume from training over rollouts that no job of this run has collected."""
        replace_text(self.path / _IMPORTED, "")

    def replace_job(self, job: "JobConfig") -> None:
        from trainer_backend.job.load import dump_job

        replace_text(self.path / "job.toml", dump_job(job))

    def append_metrics(self, row: dict[str, Any]) -> None:
        append_line(self.metrics_file, row, durable=True)

    def append_last_stage(self, row: dict[str, Any]) -> None:
        """Append the row of a stage that ends the run, for its page and report; see `forget_after`."""
        self.append_metrics({"kind": _ENDED_RUN, **row})

    def metrics(self) -> list[dict[str, Any]]:
        """Read all rows, oldest first. A line that a crash cut short is skipped."""
        return read_lines(self.metrics_file)

    def is_finished(self, iterations: int) -> bool:
        """Whether it has ended with so many iterations: a start would find nothing to do."""
        status, newest = state.read_status(self.path), latest_checkpoint(self.checkpoints)
        if status.holder is not None or status.state is None or status.state.state != "ended" or not newest:
            return False
        evaluations = {row["iteration"] for row in self.metrics() if row["kind"] == "evaluation"}
        return read_iteration(newest) >= iterations and read_iteration(newest) in evaluations

    def missing_rows(self, iteration: int) -> str | None:
        """Describe missing rows up to an iteration; each row was written before its checkpoint."""
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
        """Undo everything after an iteration, so that a resumed run can repeat it; -1: undo all iterations.

        `policy_version` is that of `tidy_spools`.
        """
        self.forget_after(iteration)
        for path in self.path.glob("curriculum/iteration_*.jsonl"):
            if int(path.stem.removeprefix("iteration_")) > iteration:
                with write_errors(path):
                    path.unlink()
        tidy_spools(self.rollouts, iteration, tell, policy_version=policy_version)

    def forget_after(self, iteration: int) -> None:
        """Drop the rows of later iterations from metrics and ledger, and of a stage that ended the run."""
        rows = self.metrics()
        rest = [row for row in rows if row.get("iteration", 0) <= iteration and row.get("kind") != _ENDED_RUN]
        if len(rest) < len(rows):
            replace_lines(self.metrics_file, rest, durable=True)
        cut_ledger(self.path, iteration)

    def remove_if_unused(self, *, with_log: bool) -> bool:
        """Delete the folder if it holds only what `create_run` made; return whether it is gone.

        Logs of child processes go too if `with_log`; they may explain a failure.
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

    A folder that a killed process left without run.json is no run; `path` may be such a folder.
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
            flush(path.parent)  # the folder's own name
    return run


def _free_folder(base: Path) -> Path:
    """Create `base`, or base-2, base-3 ... if taken; two runs that start together get one folder each."""
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
