"""Rows that the store returns: frozen dataclasses without SQLAlchemy. Times are aware, in UTC."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import tomli

JobState = Literal["queued", "running", "pausing", "paused", "cancelling", "cancelled", "succeeded", "failed"]
Wanted = Literal["run", "pause", "cancel"]
Origin = Literal["api", "cli"]
# States in which a process may be at work for the job.
ACTIVE: frozenset[JobState] = frozenset({"running", "pausing", "cancelling"})
# States in which a job stays unless somebody resumes it.
ENDED: frozenset[JobState] = frozenset({"cancelled", "succeeded", "failed"})
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """A page of a list."""

    items: tuple[Item, ...]
    cursor: str | None
    """Opaque position of the next page; None: this page is the last."""


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job at the time it was read; tables.Job describes its fields."""

    number: int
    id: str
    name: str
    state: JobState
    wanted: Wanted
    config: str
    run_dir: str | None
    run_id: str | None
    origin: Origin
    home: str
    tags: Mapping[str, str]
    attempt: int
    created: datetime
    started: datetime | None
    ended: datetime | None
    code: str | None
    detail: str | None
    version: int

    @property
    def environment(self) -> str:
        return str(tables_of(self.config).get("rollout", {}).get("env_name", ""))

    @property
    def model(self) -> str:
        table = tables_of(self.config).get("model", {})
        return str(table.get("path") or table.get("preset") or table.get("name") or "").rpartition("/")[2]


RunSort = Literal["created", "name", "state", "iteration", "finished", "outcome", "evaluation"]


@dataclass(frozen=True, slots=True)
class RunFilter:
    """A filter of runs. Fields that are empty do not filter."""

    text: str = ""
    """Part of the name, the id, the environment, the model or a tag; case-insensitive."""
    states: frozenset[JobState] = frozenset()
    """Any of them."""
    environment: str | None = None
    model: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    """All of them."""


@dataclass(frozen=True, slots=True)
class RunFacets:
    """The values by which runs can be filtered, each with its number of jobs; a tag is `key=value`."""

    environments: Mapping[str, int]
    models: Mapping[str, int]
    states: Mapping[str, int]
    tags: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line in the list of runs: the requested numbers by name."""

    job: JobRow
    iteration: int
    """The last finished one; 0 before the first."""
    finished: datetime | None
    """End of that iteration; None before the first."""
    latest: Mapping[str, float]
    """Of the last row of kind iteration; `evaluated`: of kind evaluation."""
    evaluated: Mapping[str, float]
    sums: Mapping[str, float] = field(default_factory=dict)
    """Over all rows."""
    spark: "Series | None" = None
    """The outcome of training, in few points."""


@dataclass(frozen=True, slots=True)
class Series:
    """A curve; with too many points the mean, minimum and maximum of intervals, else all three equal."""

    iterations_N: tuple[int, ...]
    """The last of each interval, ascending."""
    values_N: tuple[float, ...]
    low_N: tuple[float, ...]
    high_N: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricLine:
    """A row of metrics.jsonl. `number` increases with every row of the store: live pages resume from it."""

    number: int
    kind: str
    iteration: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A stored rollout."""

    number: int
    """Position in the order of arrival; pages use it."""
    rollout_id: str
    stage: str
    """One of train, branches, evaluation, warmup and prompts."""
    iteration: int
    file: str
    """Its Parquet file in the run directory, such as rollouts/iteration_3.parquet."""
    group_id: str
    sibling: int
    attempt: int
    policy: str
    """Last part of `model`, or the policy's name."""
    status: str
    seed: int | None
    outcome_reward: float | None
    reward: float | None
    """Sum of r_t; None where no decision has a reward."""
    unique_achievements: int | None
    decisions: int
    """Number of its decisions."""
    env_steps: int | None
    stop_reason: str | None
    failure_code: str | None
    decisions_stored: bool
    """Whether the store still has them; retention removes those of old iterations."""


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One decision of a rollout. Its credit is None until credit is assigned."""

    turn: int
    action: str
    unique_delta: int
    ach_delta: int
    unique: tuple[str, ...]
    env_reward: float
    reward: float | None
    return_to_go: float | None
    advantage: float | None
    state_key: str | None
    invalid_reason: str | None


@dataclass(frozen=True, slots=True)
class AnchorRow:
    """A decision of the same group in the same state."""

    rollout_id: str
    sibling: int
    turn: int
    action: str
    reward: float | None
    return_to_go: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint folder: its name under checkpoints/, its size in bytes."""

    folder: str
    iteration: int
    best: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Facets:
    """The values by which the rollouts of a run can be filtered, each with its count."""

    stages: Mapping[str, int]
    policies: Mapping[str, int]
    statuses: Mapping[str, int]
    failure_codes: Mapping[str, int]
    stop_reasons: Mapping[str, int]
    iterations: tuple[int, int] | None


@lru_cache(maxsize=256)
def tables_of(config: str) -> Mapping[str, Any]:
    """Parse a job's TOML; return nothing if it cannot be parsed any more."""
    try:
        return tomli.loads(config)
    except tomli.TOMLDecodeError:
        return {}


def iterations_of(config: str) -> int | None:
    """Return the number of iterations a job asks for, or None if unknown."""
    table = tables_of(config).get("training")
    iterations = table.get("iterations") if isinstance(table, Mapping) else None
    return iterations if isinstance(iterations, int) else None
