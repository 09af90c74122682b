"""Reads of a run's rollouts and their decisions for pages and the API."""

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, and_, false, func, or_, select

from trainer_backend.store.database import Store, UnknownCursor, UnknownRollout
from trainer_backend.store.rows import AnchorRow, DecisionRow, Facets, Page, RolloutRow
from trainer_backend.store.tables import Decision, LedgerRow, Rollout, SyncedFile, fits, job_number

RolloutSort = Literal["newest", "outcome_reward", "reward", "unique_achievements", "decisions"]
_FROM_FILE: Mapping[str, Any] = {"file": SyncedFile.name, "decisions_stored": SyncedFile.decisions}
_COLUMNS: list[Any] = [
    _FROM_FILE[name] if name in _FROM_FILE else getattr(Rollout, name) for name in RolloutRow.__slots__
]


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """A filter of rollouts. Fields that are None do not filter."""

    stage: str | None = None
    iteration: int | None = None
    group_id: str | None = None
    policy: str | None = None
    status: str | None = None
    failure_code: str | None = None
    stop_reason: str | None = None
    min_reward: float | None = None
    """Bounds of the outcome reward, `max_reward` included; the same of the number of decisions."""
    max_reward: float | None = None
    min_decisions: int | None = None
    max_decisions: int | None = None
    lost: bool | None = None
    """True: only those that failed, and those of training that no update was given."""
    text: str | None = None
    """Part of the rollout id, case-insensitive."""


def rollouts(
    store: Store,
    job_id: str,
    where: RolloutFilter = RolloutFilter(),
    *,
    sort: RolloutSort = "newest",
    descending: bool = True,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[RolloutRow]:
    """Return a page of rollouts. Rollouts without the sort value come last in both directions.

    Args:
        cursor: the cursor of the previous page, for the same filter and order.
    """
    column = "number" if sort == "newest" else sort
    by = getattr(Rollout, column)
    with store.read() as connection:
        query = _selected().where(*_conditions(job_number(connection, job_id), where))
        if cursor is not None:
            query = query.where(_beyond(by, *_read_cursor(cursor, by), descending=descending))
        order = (by.desc(), Rollout.number.desc()) if descending else (by.asc(), Rollout.number.asc())
        query = query.order_by(order[0].nulls_last(), order[1]).limit(limit + 1)
        rows = [RolloutRow(*row) for row in connection.execute(query)]
    if len(rows) <= limit:
        return Page(tuple(rows), None)
    end = rows[limit - 1]
    return Page(tuple(rows[:limit]), _cursor(getattr(end, column), end.number))


def count_rollouts(store: Store, job_id: str, where: RolloutFilter = RolloutFilter()) -> int:
    """Count the rollouts on all pages."""
    with store.read() as connection:
        conditions = _conditions(job_number(connection, job_id), where)
        return connection.scalar(select(func.count()).select_from(Rollout).where(*conditions)) or 0


def _selected() -> Select[Any]:
    return select(*_COLUMNS).join(SyncedFile, SyncedFile.number == Rollout.file)


def _conditions(job: int, where: RolloutFilter) -> list[ColumnElement[bool]]:
    others = ("min_reward", "max_reward", "min_decisions", "max_decisions", "lost", "text")
    conditions = [Rollout.job == job]
    for name in (field.name for field in fields(where) if field.name not in others):
        value = getattr(where, name)
        if isinstance(value, int) and not fits(value):
            conditions.append(false())  # no rollout has a number that the column cannot hold
        elif value is not None:
            conditions.append(getattr(Rollout, name) == value)
    at_least = ((Rollout.outcome_reward, where.min_reward), (Rollout.decisions, where.min_decisions))
    at_most = ((Rollout.outcome_reward, where.max_reward), (Rollout.decisions, where.max_decisions))
    conditions += [column >= value for column, value in at_least if value is not None]
    conditions += [column <= value for column, value in at_most if value is not None]
    if where.lost:
        # What is trained on has rewards. By them the index of `reward` finds the few that have none.
        failed_or_unused = or_(Rollout.status != "finished", Rollout.stage == "train")
        conditions += [Rollout.reward.is_(None), failed_or_unused]
    if where.text:
        conditions.append(Rollout.rollout_id.icontains(where.text, autoescape=True))
    return conditions


def _beyond(by: Any, value: float | None, number: int, *, descending: bool) -> ColumnElement[bool]:
    """Match the rows that follow the row with this value and number."""
    behind = Rollout.number < number if descending else Rollout.number > number
    if value is None:
        return and_(by.is_(None), behind)
    return or_(by < value if descending else by > value, and_(by == value, behind), by.is_(None))


def _cursor(value: float | None, number: int) -> str:
    return base64.urlsafe_b64encode(json.dumps([value, number]).encode()).decode().rstrip("=")


def _read_cursor(cursor: str, by: Any) -> tuple[float | None, int]:
    """Read the last sort value and row number of the previous page; both must fit their columns."""
    try:
        value, number = json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)))
        whole = by.type.python_type is int
        valid = value is None or (_is_whole(value) if whole else math.isfinite(value))
    except (ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UnknownCursor(cursor) from error
    if not (valid and _is_whole(number)):
        raise UnknownCursor(cursor)
    return value, number


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and fits(value)


def facets(store: Store, job_id: str) -> Facets:
    """Return the values by which the rollouts of a run can be filtered, with their counts."""
    columns = (Rollout.stage, Rollout.policy, Rollout.status, Rollout.failure_code, Rollout.stop_reason)
    counts: list[dict[str, int]] = [{} for _ in columns]
    spans: list[int] = []
    query = select(*columns, func.count(), func.min(Rollout.iteration), func.max(Rollout.iteration))
    with store.read() as connection:
        mine = query.where(Rollout.job == job_number(connection, job_id)).group_by(*columns)
        for *values, count, first, last in connection.execute(mine):
            spans += [first, last]
            for counter, value in zip(counts, values, strict=True):
                if value is not None:
                    counter[value] = counter.get(value, 0) + count
    iterations = (min(spans), max(spans)) if spans else None
    stages, policies, statuses, failures, stops = (dict(sorted(counter.items())) for counter in counts)
    return Facets(stages, policies, statuses, failures, stops, iterations)


def rollout(store: Store, job_id: str, rollout_id: str) -> RolloutRow:
    """Return one rollout by its id or by a suffix that only one id has (`train/3/0/1`)."""
    with store.read() as connection:
        mine = _selected().where(Rollout.job == job_number(connection, job_id))
        rows = connection.execute(mine.where(Rollout.rollout_id == rollout_id)).all()
        if not rows:
            end = f"/{rollout_id}"
            # Not LIKE, which ignores case in SQLite.
            ends = func.substr(Rollout.rollout_id, func.length(Rollout.rollout_id) - len(end) + 1) == end
            rows = connection.execute(mine.where(ends).limit(3)).all()
    if len(rows) != 1:
        some = f": {', '.join(row.rollout_id for row in rows)}" if rows else ""
        raise UnknownRollout(f"{len(rows) or 'no'} rollouts of job {job_id} are {rollout_id[:200]!r}{some}")
    return RolloutRow(*rows[0])


_DECISION = [getattr(Decision, name) for name in DecisionRow.__slots__]


def decisions(store: Store, row: RolloutRow) -> tuple[DecisionRow, ...]:
    """Return the decisions of a rollout by turn; empty where retention removed them (`decisions_stored`)."""
    query = select(*_DECISION).where(Decision.rollout == row.number).order_by(Decision.turn)
    with store.read() as connection:
        return tuple(
            DecisionRow(**{**decision._mapping, "unique": tuple(decision.unique)})
            for decision in connection.execute(query)
        )


def siblings(store: Store, job_id: str, row: RolloutRow) -> tuple[RolloutRow, ...]:
    """Return the rollouts of its group, stage and iteration, itself included, by sibling and attempt."""
    with store.read() as connection:
        query = _selected().where(*_group(job_number(connection, job_id), row))
        rows = connection.execute(query.order_by(Rollout.sibling, Rollout.attempt, Rollout.number))
        return tuple(RolloutRow(*item) for item in rows)


def _group(job: int, row: RolloutRow) -> tuple[ColumnElement[bool], ...]:
    same = (Rollout.group_id == row.group_id, Rollout.stage == row.stage, Rollout.iteration == row.iteration)
    return (Rollout.job == job, *same)


def anchors(
    store: Store, job_id: str, row: RolloutRow, state_key: str, *, limit: int
) -> tuple[AnchorRow, ...]:
    """Return the first `limit` decisions of this rollout's group in one state, by sibling and turn."""
    columns = [
        getattr(Rollout if name in ("rollout_id", "sibling") else Decision, name)
        for name in AnchorRow.__slots__
    ]
    with store.read() as connection:
        query = (
            select(*columns)
            .join(Rollout, Rollout.number == Decision.rollout)
            .where(*_group(job_number(connection, job_id), row), Decision.state_key == state_key)
            .order_by(Rollout.sibling, Decision.turn)
            .limit(limit)
        )
        return tuple(AnchorRow(*anchor) for anchor in connection.execute(query))


def learning_iteration(store: Store, job_id: str, rollout_id: str) -> int | None:
    """Return the iteration whose update learned from this rollout, or None."""
    with store.read() as connection:
        job = job_number(connection, job_id)
        query = select(LedgerRow.iteration).where(LedgerRow.job == job, LedgerRow.rollout_id == rollout_id)
        return connection.scalar(query)
