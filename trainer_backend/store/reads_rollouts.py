"""Reads the rollouts of a run for pages and the API."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import ColumnElement, Select, Text, cast, false, func, or_, select

from trainer_backend.core.advantages.branch import branch_group
from trainer_backend.rundir.rollout_index import read_credits
from trainer_backend.rundir.spool import find_in_ledger
from trainer_backend.store.database import Store, UnknownRollout
from trainer_backend.store.paging import make_page, sort_page
from trainer_backend.store.rows import AnchorRow, Page, RolloutRow
from trainer_backend.store.tables import COUNTED, JOBS, ROLLOUTS, SYNCED_FILES, fits, job_number

RolloutSort = Literal["newest", "outcome_reward", "reward", "unique_achievements", "decisions"]
# With a filter by numbers or text, counting stops at this many rollouts, so that a long run costs no more.
MOST_COUNTED = 10_000
_COLUMNS: list[Any] = [
    SYNCED_FILES.c.name if name == "file" else ROLLOUTS.c[name] for name in RolloutRow.__slots__
]


@dataclass(frozen=True, slots=True)
class RolloutFilter:
    """Conditions that a rollout must all meet. A field that is None is no condition."""

    stage: str | None = None
    iteration: int | None = None
    group_id: str | None = None
    policy: str | None = None
    status: str | None = None
    failure_code: str | None = None
    stop_reason: str | None = None
    min_reward: float | None = None
    """Smallest outcome reward. This bound and the three bounds below are inclusive."""
    max_reward: float | None = None
    min_decisions: int | None = None
    max_decisions: int | None = None
    lost: bool | None = None
    """True selects only failed rollouts and those training rollouts that no update used."""
    text: str | None = None
    """Substring of the rollout id; case is ignored."""


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
    """Return a page of a run's rollouts, after the page that returned `cursor` (see `sort_page`)."""
    column = "number" if sort == "newest" else sort
    with store.read() as connection:
        query = _selected().where(*_conditions(job_number(connection, job_id), where))
        by, number = ROLLOUTS.c[column], ROLLOUTS.c.number
        query = sort_page(query, by, number, descending=descending, cursor=cursor, limit=limit)
        rows = [RolloutRow(*row) for row in connection.execute(query)]
    return make_page(rows, column, limit)


def count_rollouts(store: Store, job_id: str, where: RolloutFilter = RolloutFilter()) -> tuple[int, bool]:
    """Return the number of rollouts on all pages, and whether this number is exact.

    With a filter by `COUNTED` columns alone, the number is the sum of the stored counts of the files, and
    always exact. With any other filter, counting stops at `MOST_COUNTED`.
    """
    if replace(where, **dict.fromkeys(COUNTED)) == RolloutFilter():
        wanted = [getattr(where, name) for name in COUNTED]
        return sum(
            count
            for values, count in _counts(store, job_id)
            if all(want is None or want == value for want, value in zip(wanted, values, strict=True))
        ), True
    with store.read() as connection:
        conditions = _conditions(job_number(connection, job_id), where)
        some = select(ROLLOUTS.c.number).where(*conditions).limit(MOST_COUNTED + 1).subquery()
        found = connection.scalar(select(func.count()).select_from(some)) or 0
    return min(found, MOST_COUNTED), found <= MOST_COUNTED


def _counts(store: Store, job_id: str) -> Iterator[tuple[list[Any], int]]:
    """Yield, file by file, each combination of values of the `COUNTED` columns and its number of rollouts."""
    with store.read() as connection:
        # The counts of all files come as one string: with a row per file, a long run would be slow.
        texts = func.aggregate_strings(cast(SYNCED_FILES.c.counts, Text), ",")
        query = select(texts).where(SYNCED_FILES.c.job == job_number(connection, job_id))
        files = json.loads(f"[{connection.scalar(query) or ''}]")
    for *values, count in chain.from_iterable(files):
        yield values, count


def _selected() -> Select[Any]:
    return select(*_COLUMNS).join(SYNCED_FILES, SYNCED_FILES.c.number == ROLLOUTS.c.file)


def _conditions(job: int, where: RolloutFilter) -> list[ColumnElement[bool]]:
    others = ("min_reward", "max_reward", "min_decisions", "max_decisions", "lost", "text")
    conditions = [ROLLOUTS.c.job == job]
    for name in (field.name for field in fields(where) if field.name not in others):
        value = getattr(where, name)
        if isinstance(value, int) and not fits(value):
            conditions.append(false())  # no rollout has a number that the column cannot hold
        elif value is not None:
            conditions.append(ROLLOUTS.c[name] == value)
    for column, low, high in (
        (ROLLOUTS.c.outcome_reward, where.min_reward, where.max_reward),
        (ROLLOUTS.c.decisions, _clip(where.min_decisions), _clip(where.max_decisions)),
    ):
        if low is not None:
            conditions.append(column >= low)
        if high is not None:
            conditions.append(column <= high)
    if where.lost:
        # Rollouts that an update used have rewards, so the index of `reward` finds the few others.
        failed_or_unused = or_(ROLLOUTS.c.status != "finished", ROLLOUTS.c.stage == "train")
        conditions += [ROLLOUTS.c.reward.is_(None), failed_or_unused]
    if where.text:
        conditions.append(ROLLOUTS.c.rollout_id.icontains(where.text, autoescape=True))
    return conditions


def _clip(bound: int | None) -> int | None:
    """Return the bound, limited to the integers that a column can hold."""
    return bound if bound is None or fits(bound) else 2**31 - 1 if bound > 0 else -(2**31)


def facets(store: Store, job_id: str) -> dict[str, Any]:
    """Return the number of rollouts for each value by which a run's rollouts can be filtered.

    The outer keys are `stages`, `policies`, `statuses`, `failure_codes` and `stop_reasons`. Another key,
    `iterations`, holds the first and the last iteration, or None if there are no rollouts.
    """
    totals: Counter[tuple[Any, ...]] = Counter()
    iterations = set()
    for (*named, iteration), count in _counts(store, job_id):
        totals[*named] += count
        iterations.add(iteration)
    counters: list[Counter[Any]] = [Counter() for _ in COUNTED[:-1]]
    for values, count in totals.items():
        for counter, value in zip(counters, values, strict=True):
            counter[value] += count
    names = ("stages", "policies", "statuses", "failure_codes", "stop_reasons")
    values_by_name = {
        name: {value: counter[value] for value in sorted(set(counter) - {None})}
        for name, counter in zip(names, counters, strict=True)
    }
    return values_by_name | {"iterations": (min(iterations), max(iterations)) if iterations else None}


def rollout(store: Store, job_id: str, rollout_id: str) -> RolloutRow:
    """Return the rollout with this id, or else the only rollout whose id ends in `/` and this text."""
    with store.read() as connection:
        mine = _selected().where(ROLLOUTS.c.job == job_number(connection, job_id))
        rows = connection.execute(mine.where(ROLLOUTS.c.rollout_id == rollout_id)).all()
        if not rows:
            end = f"/{rollout_id}"
            # Not LIKE, which ignores case in SQLite.
            ends = (
                func.substr(ROLLOUTS.c.rollout_id, func.length(ROLLOUTS.c.rollout_id) - len(end) + 1) == end
            )
            rows = connection.execute(mine.where(ends).limit(3)).all()
    if len(rows) != 1:
        some = f": {', '.join(row.rollout_id for row in rows)}" if rows else ""
        raise UnknownRollout(f"{len(rows) or 'no'} rollouts of job {job_id} are {rollout_id[:200]!r}{some}")
    return RolloutRow(*rows[0])


def siblings(store: Store, job_id: str, row: RolloutRow) -> tuple[RolloutRow, ...]:
    """Return the rollouts of this rollout's group, stage and iteration, sorted by sibling and attempt.

    This rollout is one of them.
    """
    with store.read() as connection:
        query = _selected().where(*_group(job_number(connection, job_id), row))
        rows = connection.execute(query.order_by(ROLLOUTS.c.sibling, ROLLOUTS.c.attempt, ROLLOUTS.c.number))
        return tuple(RolloutRow(*item) for item in rows)


def branches(store: Store, job_id: str, row: RolloutRow, turn: int) -> tuple[RolloutRow, ...]:
    """Return the rollouts that branch off just before decision `turn` of this rollout.

    They are sorted by sibling and attempt.
    """
    group_id = branch_group(row.rollout_id, turn)
    return siblings(store, job_id, replace(row, group_id=group_id, stage="branches"))


def _group(job: int, row: RolloutRow) -> tuple[ColumnElement[bool], ...]:
    same = (
        ROLLOUTS.c.group_id == row.group_id,
        ROLLOUTS.c.stage == row.stage,
        ROLLOUTS.c.iteration == row.iteration,
    )
    return (ROLLOUTS.c.job == job, *same)


def anchors(
    store: Store, job_id: str, row: RolloutRow, state_key: str, *, limit: int
) -> tuple[AnchorRow, ...]:
    """Return the decisions that rollouts of this rollout's group made in the state `state_key`.

    The first `limit` decisions are returned, sorted by sibling and turn. They are read from the run's files;
    decisions in deleted files are missing.
    """
    group = siblings(store, job_id, row)
    found = []
    for name in {one.file for one in group}:
        rows = sorted((one for one in group if one.file == name), key=lambda one: one.place)
        try:
            credits = read_credits(_run_dir(store, job_id) / name, [one.place for one in rows])
        except FileNotFoundError:
            continue
        found += [
            AnchorRow(one.rollout_id, one.sibling, *(decision[name] for name in AnchorRow.__slots__[2:]))
            for one, decisions in zip(rows, credits, strict=True)
            for decision in decisions
            if decision["state_key"] == state_key
        ]
    return tuple(sorted(found, key=lambda anchor: (anchor.sibling, anchor.turn))[:limit])


def _run_dir(store: Store, job_id: str) -> Path:
    """Return the run directory of a job. If the job has none, return a path below which no file exists."""
    with store.read() as connection:
        run_dir = connection.scalar(
            select(JOBS.c.run_dir).where(JOBS.c.number == job_number(connection, job_id))
        )
        return Path(run_dir or os.devnull)


def learning_iteration(store: Store, job_id: str, rollout_id: str) -> int | None:
    """Return the iteration whose update used this rollout, according to the run's ledger, or None."""
    return find_in_ledger(_run_dir(store, job_id), rollout_id)
