"""Rows that the store returns: frozen, without SQLAlchemy. Times are UTC and aware."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import tomli

JobState = Literal["queued", "running", "pausing", "paused", "cancelling", "cancelled", "succeeded", "failed"]
Wanted = Literal["run", "pause", "cancel"]
Origin = Literal["api", "cli"]
# A process may be at work for it.
ACTIVE: frozenset[JobState] = frozenset({"running", "pausing", "cancelling"})
# It ends here, unless somebody asks for more.
ENDED: frozenset[JobState] = frozenset({"cancelled", "succeeded", "failed"})
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    """Some rows of a list, and where the next page begins.

    Attributes:
        cursor: to be given back for the next page, opaque; None: this was the last.
    """

    items: tuple[Item, ...]
    cursor: str | None


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job as it was when it was read.

    Attributes:
        number: in order of creation.
        config: the resolved TOML, without secrets.
        home: which service runs it.
        version: counts changes; a change says which version it was decided on.
        attempt: how often a process was started for it.
        code, detail: why it failed, or was stopped; a code for programs and a sentence.
    """

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


@dataclass(frozen=True, slots=True)
class RunSummary:
    """A line in the list of runs.

    Attributes:
        iteration: the last finished one, 0 before the first.
        finished: when that was; None before the first.
        latest, evaluated: numbers of the last rows of kind iteration and evaluation, by metric name, of those
            that were asked for; absent where there is none.
    """

    job: JobRow
    iteration: int
    finished: datetime | None
    latest: Mapping[str, float]
    evaluated: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Series:
    """A curve; of one that was thinned each point is the mean of a stretch, low and high its bounds.

    Attributes:
        iterations_N: the last iteration of each stretch, ascending.
        values_N, low_N, high_N: mean, least and greatest value of it; all equal where nothing was thinned.
    """

    iterations_N: tuple[int, ...]
    values_N: tuple[float, ...]
    low_N: tuple[float, ...]
    high_N: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricLine:
    """A row of metrics.jsonl. `number` grows with every row of the store: a live page goes on from it."""

    number: int
    kind: str
    iteration: int
    row: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """A stored rollout.

    Attributes:
        number: in order of arrival; pages go by it.
        stage: train, branches, evaluation, warmup or prompts.
        file: its Parquet file in the run directory, such as rollouts/iteration_3.parquet.
        policy: last part of `model`, or the policy's name.
        reward: sum of r_t, None where nothing was credited.
        decisions: how many it has; `decisions_stored` tells whether they are in the store: retention takes
            those of old iterations out.
    """

    number: int
    rollout_id: str
    stage: str
    iteration: int
    file: str
    group_id: str
    sibling: int
    attempt: int
    policy: str
    status: str
    seed: int | None
    outcome_reward: float | None
    reward: float | None
    unique_achievements: int | None
    decisions: int
    env_steps: int | None
    stop_reason: str | None
    failure_code: str | None
    decisions_stored: bool


@dataclass(frozen=True, slots=True)
class DecisionRow:
    """One decision of a rollout; credit is None where none was given."""

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
    """A decision of the same group that was made in the same state."""

    rollout_id: str
    sibling: int
    turn: int
    action: str
    reward: float | None
    return_to_go: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint folder, by its name under checkpoints/; size in bytes."""

    folder: str
    iteration: int
    best: bool
    bytes: int


@dataclass(frozen=True, slots=True)
class Facets:
    """What the rollouts of a run can be filtered by, each value with its count."""

    stages: Mapping[str, int]
    policies: Mapping[str, int]
    statuses: Mapping[str, int]
    failure_codes: Mapping[str, int]
    stop_reasons: Mapping[str, int]
    iterations: tuple[int, int] | None


@lru_cache(maxsize=256)
def tables_of(config: str) -> Mapping[str, Any]:
    """The job's tables; nothing where its text cannot be read any more."""
    try:
        return tomli.loads(config)
    except tomli.TOMLDecodeError:
        return {}


def iterations_of(config: str) -> int | None:
    """How many it is to do; None where that is not known."""
    table = tables_of(config).get("training")
    found = table.get("iterations") if isinstance(table, Mapping) else None
    return found if isinstance(found, int) else None
