"""What the files of a run tell, sorted for the report. Nothing here is computed that is not in a file."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_backend.collect.metrics import outcome_name
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.layout import RunDirectory

Row = Mapping[str, Any]

FAILURE = "rollout/failure/"
EVALUATE_S = "time/evaluate_s"


@dataclass(frozen=True, slots=True)
class Story:
    """A run as its files tell it.

    Attributes:
        job: the resolved job.
        run_id: names the run at task apps.
        rows: of metrics.jsonl, oldest first.
        rollouts: the folder of its Parquet files.
    """

    job: JobConfig
    run_id: str
    rows: Sequence[Row]
    rollouts: Path

    @property
    def iterations(self) -> list[Row]:
        return self._of("iteration")

    @property
    def by_actor(self) -> list[Row]:
        """The iterations in which the policy in training played: in a mixture perhaps not all."""
        return [row for row in self.iterations if "episode/outcome_reward" in row]

    @property
    def evaluations(self) -> list[Row]:
        return self._of("evaluation")

    @property
    def best_evaluation(self) -> Row | None:
        return best_of(self.evaluations)

    @property
    def landmarks(self) -> list[tuple[str, Row]]:
        """The first, best and last evaluation; one that is several of these comes once: "first, best"."""
        best = self.best_evaluation
        if best is None:
            return []
        found = {"first": self.evaluations[0], "best": best, "last": self.evaluations[-1]}
        rows = {row["iteration"]: row for row in found.values()}
        return [
            (", ".join(word for word, row in found.items() if row["iteration"] == iteration), row)
            for iteration, row in rows.items()
        ]

    @property
    def told(self) -> Row | None:
        """A row that names the outcome of the run's episodes: the last one that was played with it."""
        return next(iter(self.evaluations[-1:] + self.iterations[-1:]), None)

    @property
    def unit(self) -> str:
        """What an evaluation plays once each."""
        return "world" if self.job.data is None else "row"

    @property
    def outcome(self) -> str:
        """What the environment calls the outcome of an episode."""
        return outcome_name(self.told)

    @property
    def teacher(self) -> Row | None:
        """Episodes that the warm-up imitates."""
        return next(iter(self._of("teacher")), None)

    @property
    def warmup(self) -> Row | None:
        """The supervised steps."""
        return next(iter(self._of("warmup")), None)

    @property
    def failures(self) -> Counter[str]:
        """How often each failure code was met, over all stages; retried rollouts included."""
        counts: Counter[str] = Counter()
        for row in self.rows:
            for name, value in row.items():
                if name.startswith(FAILURE):
                    counts[name.removeprefix(FAILURE)] += int(value)
        return counts

    def total(self, name: str) -> float:
        """Sum of a metric over all rows that have it."""
        return sum(float(row[name]) for row in self.rows if name in row)

    def rollouts_file(self, name: str) -> Path | None:
        """A Parquet file of the run, if it is there."""
        path = self.rollouts / f"{name}.parquet"
        return path if path.exists() else None

    def _of(self, kind: str) -> list[Row]:
        return [row for row in self.rows if row.get("kind") == kind]


def best_of(evaluations: Sequence[Row]) -> Row | None:
    """The evaluation that `checkpoints/best` belongs to: highest mean outcome, the first of equals.

    One that lost episodes for good is passed over, as it is for the checkpoint.
    """
    whole = [row for row in evaluations if not row.get("rollout/failed")]
    return max(whole, key=lambda row: row["eval/outcome_reward"], default=None)


def read_story(directory: RunDirectory) -> Story:
    """Read job and metrics.

    Raises:
        JobError: job.toml is gone or was edited into something invalid.
    """
    return Story(directory.job(), directory.run_id, directory.metrics(), directory.path / "rollouts")
