"""The classes of the store's rows. tables.py derives its columns from their fields.

This module does not import SQLAlchemy. All times are in UTC.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Generic, Literal, TypeVar

import tomli
from pydantic import Field

from shared_schemas.base import Body

JobState = Literal["queued", "running", "pausing", "paused", "cancelling", "cancelled", "succeeded", "failed"]
Wanted = Literal["run", "pause", "cancel"]
Origin = Literal["api", "cli"]
# States in which a process may be at work for the job.
ACTIVE: frozenset[JobState] = frozenset({"running", "pausing", "cancelling"})
# States in which a job stays unless it is resumed.
ENDED: frozenset[JobState] = frozenset({"cancelled", "succeeded", "failed"})
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Page(Generic[Item]):
    items: tuple[Item, ...]
    cursor: str | None  # opaque position of the next page; None: this page is the last


class Progress(Body):
    """The progress of a job from `state.json` of its run directory.

    `iteration` is the last finished iteration of `iterations` in total. The current `stage` has finished
    `done` of its `total` steps.
    """

    state: str
    iteration: int
    iterations: int | None
    stage: str
    done: int
    total: int
    since: str


class JobView(Body):
    """A job as the API shows it. `attempt` counts the processes that have been started for it so far.

    `wanted` is what was last requested: to run, pause or cancel the job. `code` and `detail` say why the job
    failed, was stopped, or is being restarted.
    """

    id: str
    name: str
    state: JobState
    wanted: Wanted
    origin: Origin
    tags: dict[str, str]
    attempt: int
    created: datetime
    started: datetime | None
    ended: datetime | None
    code: str | None
    detail: str | None
    run_dir: str | None
    run_id: str | None
    version: int = Field(description="counts changes of the job")
    progress: Progress | None = None


# `created` of a job that has not been stored yet.
_NEVER = datetime(1, 1, 1, tzinfo=UTC)


class Job(JobView):
    """A row of the table `jobs`: a job posted to the service, or a run that `turnwise train` created.

    A new job needs `name`, `config` and `home`; the store sets `number`, `id` and `created`.
    """

    id: str = ""  # uuid, hex
    state: JobState = "queued"
    wanted: Wanted = "run"
    origin: Origin = "api"
    tags: dict[str, str] = Field(default_factory=dict)
    attempt: int = 0
    created: datetime = _NEVER
    started: datetime | None = None
    ended: datetime | None = None
    code: str | None = None  # why the job failed or was stopped, for programs; `detail` says it as a sentence
    detail: str | None = None
    run_dir: str | None = None  # absolute; None until the job has one
    run_id: str | None = None
    version: int = 1  # number of changes; compare-and-set uses it

    number: int = 0  # increases in order of creation; the cursor of a page is a number
    config: str  # the resolved TOML, without secrets
    home: str  # the service that runs it: several services may share one PostgreSQL, but no disk
    idempotency_key: str | None = None  # the client's key for its request to that service
    body_hash: str | None = None  # a digest of that request's body

    # For the list of runs. The first two come from the config. A sync reads the others from the run,
    # without changing `version`.
    environment: str = ""
    model: str = ""
    iteration: int = 0  # the last finished one; 0 before the first
    finished: datetime | None = None  # when the sync first saw the row of that iteration
    outcome: float | None = None  # mean outcome reward of that iteration
    evaluation: float | None = None  # the outcome of the last evaluation
    numbers: dict[str, Any] = Field(default_factory=dict)  # see metrics.summarise


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric over iterations. Each point of a long curve is the mean of an interval of iterations.

    `low` and `high` are the minimum and the maximum of each interval.
    """

    __pydantic_config__ = Body.model_config  # replies of the API contain it unchanged
    iterations: tuple[int, ...]  # the last iteration of each interval, ascending
    values: tuple[float, ...]
    low: tuple[float, ...]
    high: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class MetricLine:
    """A row of metrics.jsonl. `number` increases from row to row, so that pages can request later rows."""

    number: int
    kind: str
    iteration: int
    row: Mapping[str, Any]

    @property
    def whole(self) -> dict[str, Any]:
        """The row with its kind and iteration, even if the file leaves them out."""
        return {**self.row, "kind": self.kind, "iteration": self.iteration}


@dataclass(frozen=True, slots=True)
class RolloutRow:
    """The entry of a rollout in the store's index."""

    number: int  # increases in the order of indexing; breaks ties when pages are sorted
    rollout_id: str
    stage: str  # train, branches, evaluation, warmup or prompts
    iteration: int
    file: str  # in the run directory, such as rollouts/iteration_3.parquet
    place: int  # its row in that file, from 0
    group_id: str
    sibling: int
    attempt: int
    policy: str  # the last part of `model`, or the policy's name
    status: str
    seed: int | None
    outcome_reward: float | None
    reward: float | None  # sum of r_t; None where no decision has a reward
    unique_achievements: int | None
    decisions: int
    env_steps: int | None
    stop_reason: str | None
    failure_code: str | None


@dataclass(frozen=True, slots=True)
class AnchorRow:
    """A decision that a rollout of a group made in a given state; see `reads_rollouts.anchors`."""

    rollout_id: str
    sibling: int
    turn: int
    action: str
    reward: float | None
    return_to_go: float | None
    advantage: float | None


@dataclass(frozen=True, slots=True)
class CheckpointRow:
    """A checkpoint: the name of its folder under checkpoints/, and the folder's size in bytes.

    `best` is True for the best checkpoint of the run.
    """

    folder: str
    iteration: int
    best: bool
    bytes: int


@lru_cache(maxsize=256)
def parse_tables(config: str) -> Mapping[str, Any]:
    """Parse a job's TOML; return an empty mapping if it cannot be parsed."""
    try:
        return tomli.loads(config)
    except tomli.TOMLDecodeError:
        return {}


def named_in(config: str) -> dict[str, str]:
    """Return the names of the environment and the model in a job's TOML; a missing name becomes ""."""
    tables = parse_tables(config)
    rollout, model = (tables.get(name, {}) for name in ("rollout", "model"))
    named = next((model[key] for key in ("preset", "path", "name") if model.get(key)), "")
    return {
        "environment": str(rollout.get("env_name", "")),
        "model": str(named).rstrip("/").rpartition("/")[2],
    }


def read_iterations(config: str) -> int | None:
    """Return the number of iterations that a job's TOML sets, or None if it sets none."""
    table = parse_tables(config).get("training")
    iterations = table.get("iterations") if isinstance(table, Mapping) else None
    return iterations if isinstance(iterations, int) else None
