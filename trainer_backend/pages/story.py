"""The rows of a run's files, sorted for the report."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from trainer_backend.collect.losses import FAILED, FINISHED, Losses, sum_losses
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.evaluation.best import find_best, read_outcomes
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.layout import RunDirectory

Row = Mapping[str, Any]

EVALUATE_S = "time/evaluate_s"


@dataclass(frozen=True, slots=True)
class Story:
    """The job, metrics and rollout files of a run."""

    job: JobConfig
    """The resolved job."""
    run_id: str
    """The name of the run at task apps."""
    rows: Sequence[Row]
    """Rows of metrics.jsonl, oldest first."""
    rollouts: Path
    """The folder of its Parquet files."""

    @property
    def iterations(self) -> list[Row]:
        return self._of("iteration")

    @property
    def by_actor(self) -> list[Row]:
        """The iterations in which the policy in training played; in a mixture it may miss some."""
        return [row for row in self.iterations if "episode/outcome_reward" in row]

    @property
    def evaluations(self) -> list[Row]:
        return self._of("evaluation")

    @property
    def best_evaluation(self) -> Row | None:
        """The evaluation of `checkpoints/best`."""
        most = self.job.training.max_lost_share
        files = self.rollouts
        return find_best(
            self.evaluations, lambda at: read_outcomes(files / f"evaluation_{at}.parquet"), most=most
        ).row

    @property
    def landmarks(self) -> list[tuple[str, Row]]:
        """The first, best and last evaluation; the words of equal ones are joined: "first, best"."""
        if not self.evaluations:
            return []
        best = self.best_evaluation
        by_word = {
            "first": self.evaluations[0],
            **({} if best is None else {"best": best}),
            "last": self.evaluations[-1],
        }
        rows = {row["iteration"]: row for row in by_word.values()}
        return [
            (", ".join(word for word, row in by_word.items() if row["iteration"] == iteration), row)
            for iteration, row in rows.items()
        ]

    @property
    def last_episodes(self) -> Row | None:
        """The row of the last evaluation, or else of the last iteration; it names the run's outcome."""
        return next(iter(self.evaluations[-1:] + self.iterations[-1:]), None)

    @property
    def unit(self) -> str:
        """The word for what an evaluation plays once each."""
        return "world" if self.job.data is None else "row"

    @property
    def outcome(self) -> str:
        """The environment's name for the outcome of an episode."""
        return outcome_name(self.last_episodes)

    @property
    def teacher(self) -> Row | None:
        """The row of the episodes that the warm-up imitates."""
        return next(iter(self._of("teacher")), None)

    @property
    def warmup(self) -> Row | None:
        """The row of the supervised steps."""
        return next(iter(self._of("warmup")), None)

    @property
    def failures(self) -> Counter[str]:
        """The number of failures by code, over all stages; retried rollouts count too."""
        prefix, counts = "rollout/failure/", Counter[str]()
        for name, value in chain.from_iterable(row.items() for row in self.rows):
            if name.startswith(prefix):
                counts[name.removeprefix(prefix)] += int(value)
        return counts

    @property
    def losses(self) -> Losses:
        """What all stages lost, without the causes."""
        return sum_losses({name: self.total(name) for name in (*FAILED, *FINISHED)})

    def total(self, name: str) -> float:
        """The sum of a metric over all rows."""
        return sum(float(row[name]) for row in self.rows if name in row)

    def rollouts_file(self, name: str) -> Path | None:
        """A Parquet file of the run, or None."""
        path = self.rollouts / f"{name}.parquet"
        return path if path.exists() else None

    def _of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == kind]


def read_story(directory: RunDirectory) -> Story:
    return Story(directory.job(), directory.run_id, directory.metrics(), directory.path / "rollouts")
