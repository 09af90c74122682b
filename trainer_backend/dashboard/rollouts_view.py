"""Pure: the list of rollouts: what an address asks for, and the lines of its table."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args
from urllib.parse import quote, urlencode

from trainer_backend.dashboard.errors import BadAddress
from trainer_backend.dashboard.figures import NONE, number, signed, spaced
from trainer_backend.store.reads_rollouts import RolloutFilter, RolloutSort
from trainer_backend.store.rows import Facets, RolloutRow

_SORTS: dict[str, RolloutSort] = {name: name for name in get_args(RolloutSort)}
_NUMBERS = {"iteration": int, "min_reward": float}
# What a database compares with: of a larger whole number it makes an error.
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Asked:
    """Which rollouts, in which order, from where on."""

    where: RolloutFilter
    sort: RolloutSort = "newest"
    down: bool = True
    cursor: str | None = None

    @property
    def filtered(self) -> bool:
        return self.where != RolloutFilter()

    def query(self, **changes: Any) -> str:
        """As an address has it; what is absent is left out."""
        known = {name: getattr(self.where, name) for name in _filters()}
        known |= {"sort": self.sort, "down": int(self.down), "cursor": self.cursor} | changes
        return urlencode({name: value for name, value in known.items() if value is not None})


@dataclass(frozen=True, slots=True)
class RolloutLine:
    """A line of the table."""

    href: str
    short: str
    group: str
    sibling: int
    attempt: int
    stage: str
    policy: str
    outcome: str
    reward: str
    unique: str
    decisions: int
    env_steps: str
    status: str
    failed: bool
    ended: str


@dataclass(frozen=True, slots=True)
class FacetLists:
    """What can be chosen, each value with its count; `span` are the iterations, in words."""

    stages: tuple[tuple[str, int], ...]
    policies: tuple[tuple[str, int], ...]
    statuses: tuple[tuple[str, int], ...]
    failures: tuple[tuple[str, int], ...]
    stops: tuple[tuple[str, int], ...]
    span: str


def asked_of(params: Mapping[str, str]) -> Asked:
    """What an address asks for; a form sends its empty fields too, and they narrow nothing.

    Raises:
        BadAddress: a number that is none, or an order that there is not.
    """
    given = {name: params[name] for name in _filters() if params.get(name, "").strip()}
    where = RolloutFilter(**{name: _value(name, text.strip()) for name, text in given.items()})
    wanted = params.get("sort") or "newest"
    sort = _SORTS.get(wanted)
    if sort is None:
        raise BadAddress(f"sort is {wanted[:40]!r}; known: {', '.join(_SORTS)}")
    return Asked(where, sort, params.get("down", "1") != "0", params.get("cursor") or None)


def rollout_line(job_id: str, row: RolloutRow) -> RolloutLine:
    failed = row.status != "finished"
    return RolloutLine(
        href=rollout_address(job_id, row.rollout_id),
        short=short_id(row.rollout_id),
        group=row.group_id,
        sibling=row.sibling,
        attempt=row.attempt,
        stage=row.stage,
        policy=row.policy,
        outcome=number(row.outcome_reward),
        reward=signed(row.reward),
        unique=NONE if row.unique_achievements is None else str(row.unique_achievements),
        decisions=row.decisions,
        env_steps=NONE if row.env_steps is None else str(row.env_steps),
        status=row.status,
        failed=failed,
        ended=spaced((row.failure_code if failed else row.stop_reason) or NONE),
    )


def facet_lists(found: Facets) -> FacetLists:
    first, last = found.iterations or (0, 0)
    return FacetLists(
        stages=tuple(found.stages.items()),
        policies=tuple(found.policies.items()),
        statuses=tuple(found.statuses.items()),
        failures=tuple(found.failure_codes.items()),
        stops=tuple(found.stop_reasons.items()),
        span=f"{first} to {last}" if last else "",
    )


def rollout_address(job_id: str, rollout_id: str, turn: int | None = None) -> str:
    """The page of a rollout, whose id has slashes; at one of its decisions."""
    return f"/runs/{job_id}/rollouts/{quote(rollout_id, safe='/')}" + (f"?turn={turn}" if turn else "")


def short_id(rollout_id: str) -> str:
    """Without the run's name, which stands above it: `train/3/0/1`."""
    return rollout_id.partition("/")[2] or rollout_id


def caption(rows: Sequence[RolloutRow], total: int, asked: Asked) -> str:
    """What the table shows, for its reader and for who hears it."""
    order = "newest first" if asked.sort == "newest" and asked.down else f"by {spaced(asked.sort)}"
    way = "" if asked.sort == "newest" and asked.down else f", {'highest' if asked.down else 'lowest'} first"
    return f"{len(rows)} of {total:,} rollouts, {order}{way}"


def _filters() -> list[str]:
    return [field.name for field in fields(RolloutFilter)]


def _value(name: str, text: str) -> Any:
    kind = _NUMBERS.get(name)
    if kind is None:
        return text
    try:
        value = kind(text)
    except ValueError:
        value = math.inf
    if not abs(value) <= _LARGEST:  # nor is it NaN
        what = "a whole number" if kind is int else "a number"
        raise BadAddress(f"{name} is {text[:40]!r}; it must be {what} of at most {_LARGEST}")
    return value
