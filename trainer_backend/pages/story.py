"""Reads the files of a run for the report, for comparisons and for the terminal."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer_backend.collect.losses import FAILED, FINISHED
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.evaluation.best import find_best, read_outcomes
from trainer_backend.job.load import dump_job
from trainer_backend.job.schema import JobConfig
from trainer_backend.pages.run_data import Run
from trainer_backend.pages.run_view import RATES
from trainer_backend.pages.series import Curves
from trainer_backend.rundir.data_record import DataRecord, read_record
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.state import read_status
from trainer_backend.store.jobs import state_of_run
from trainer_backend.store.reads import checkpoint_rows
from trainer_backend.store.rows import Job

Row = Mapping[str, Any]

EVALUATE_S = "time/evaluate_s"


@dataclass(frozen=True)
class Story:
    """Gives access to the job, the metrics and the rollout files of a run."""

    directory: RunDirectory
    name: str
    """The job's name, or in a comparison the unique end of the run's path."""
    job: JobConfig
    rows: Sequence[Row]  # of metrics.jsonl, oldest first

    @cached_property
    def data(self) -> DataRecord | None:
        """The run's record of its data set; None if the run has written none."""
        return read_record(self.directory)

    @cached_property
    def config(self) -> str:
        return dump_job(self.job)

    @property
    def iterations(self) -> list[Row]:
        return self.select_rows("iteration")

    @property
    def by_actor(self) -> list[Row]:
        """The iterations in which the actor played. In a mixture, fixed policies play the others."""
        return [row for row in self.iterations if "episode/outcome_reward" in row]

    @property
    def evaluations(self) -> list[Row]:
        return self.select_rows("evaluation")

    @property
    def best_evaluation(self) -> Row | None:
        """The evaluation that tested the weights in `checkpoints/best`."""
        return find_best(
            self.evaluations,
            lambda at: read_outcomes(self.directory.rollouts_file(f"evaluation_{at}")),
            most=self.job.training.max_lost_share,
        ).row

    @property
    def landmarks(self) -> list[tuple[str, Row]]:
        """The first, the best and the last evaluation, each with its label.

        An evaluation that is two of these appears once, for example with the label "first, best".
        """
        rows = self.evaluations
        marks = [("first", rows[0]), ("best", self.best_evaluation), ("last", rows[-1])] if rows else []
        by_iteration: dict[int, tuple[list[str], Row]] = {}
        for word, row in marks:
            if row is not None:
                by_iteration.setdefault(row["iteration"], ([], row))[0].append(word)
        return [(", ".join(words), row) for words, row in by_iteration.values()]

    @property
    def last(self) -> Row | None:
        return next(iter(self.evaluations[-1:]), None)

    @property
    def last_episodes(self) -> Row | None:
        """The row of the last evaluation or, if none exists, of the last iteration. `outcome` reads it."""
        return next(iter(self.evaluations[-1:] + self.iterations[-1:]), None)

    @property
    def unit(self) -> str:
        """The word for what an evaluation counts: "row" (of a data set) or "world"."""
        return "world" if self.job.data is None else "row"

    @property
    def outcome(self) -> str:
        return outcome_name(self.last_episodes)

    @property
    def sums(self) -> dict[str, float]:
        """The numbers of failed and of finished rollouts over all stages, by the name of the metric."""
        return {name: self.total(name) for name in (*FAILED, *FINISHED)}

    def total(self, name: str) -> float:
        return sum(float(row[name]) for row in self.rows if name in row)

    def rollouts_file(self, name: str) -> Path | None:
        """Return the path of a Parquet file of the run, or None if it does not exist."""
        path = self.directory.rollouts_file(name)
        return path if path.exists() else None

    def job_row(self) -> Job:
        """Return the row that a service's store would contain for the run; `created` is the current time."""
        directory = self.directory
        state, code, detail = state_of_run(read_status(directory.path))
        return Job(
            name=self.name, state=state, config=self.config, run_dir=str(directory.path),
            run_id=directory.run_id, origin="cli", home="", attempt=1, created=datetime.now(UTC), code=code,
            detail=detail, version=0, iteration=len(self.iterations), numbers={"sums": self.sums},
        )  # fmt: skip

    def as_run(self, curves: Curves) -> Run:
        """Return the `Run` from which a page is made; `curves` are the curves of its metrics."""
        rates = {name: series for (_, name), series in curves.items() if name.startswith(RATES)}
        best = self.best_evaluation["iteration"] if self.best_evaluation else None
        checkpoints = checkpoint_rows(self.directory.checkpoints)
        return Run(self.job_row(), self.name, self.rows, rates, best, checkpoints)

    def select_rows(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == kind]


def read_story(directory: RunDirectory, name: str | None = None) -> Story:
    job = directory.job()
    return Story(directory, name or job.job.name, job, directory.metrics())
