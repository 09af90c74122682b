"""Reads of a run's metrics for pages and the API. Each needs a fixed number of queries, however long the run.

Reads of rollouts and decisions: reads_rollouts.py.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from typing import Any

from sqlalchemy import Connection, Subquery, and_, func, select

from trainer_backend.store import jobs as stored_jobs
from trainer_backend.store.database import Store, UnknownCursor
from trainer_backend.store.rows import (
    CheckpointRow,
    JobRow,
    MetricLine,
    Page,
    RunFacets,
    RunFilter,
    RunSort,
    RunSummary,
    Series,
)
from trainer_backend.store.tables import (
    Checkpoint,
    Curve,
    Iteration,
    Metric,
    MetricRow,
    fits,
    job_number,
    job_numbers,
)

_LINE = [getattr(MetricRow, name) for name in MetricLine.__slots__]
_CHECKPOINT = [getattr(Checkpoint, name) for name in CheckpointRow.__slots__]


_OUTCOME = "episode/outcome_reward"
_SHOWN = (_OUTCOME, "eval/outcome_reward", "eval/outcome_reward_low", "eval/outcome_reward_high")
_LOSSES = ("rollout/failed", "branch/failed", "rollout/finished", "branch/rollouts")


def run_summaries(
    store: Store,
    where: RunFilter = RunFilter(),  # noqa: B008 (frozen)
    *,
    sort: RunSort = "created",
    descending: bool = True,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[RunSummary]:
    """Return a page of runs. Those without the sort value come last in both directions."""
    rows = [job for job in _all_jobs(store) if _matches(job, where)]
    values: dict[int, Any] = {
        one.job.number: {
            "created": one.job.number, "name": one.job.name, "state": one.job.state,
            "iteration": one.iteration, "finished": one.finished, "outcome": one.latest.get(_OUTCOME),
            "evaluation": one.evaluated.get("eval/outcome_reward"),
        }[sort]
        for one in summaries(store, rows, _SHOWN)
    }  # fmt: skip
    rows.sort(key=lambda job: job.number, reverse=descending)
    some = [job for job in rows if values[job.number] is not None]
    some.sort(key=lambda job: values[job.number], reverse=descending)
    rows = some + [job for job in rows if values[job.number] is None]
    numbers = [str(job.number) for job in rows]
    if cursor is not None and cursor not in numbers:
        raise UnknownCursor(cursor)
    start = 0 if cursor is None else numbers.index(cursor) + 1
    shown = rows[start : start + limit]
    ids = [job.id for job in shown]
    sparks = series(store, ids, [_OUTCOME], points=60) if ids else {}
    items = [
        replace(one, spark=sparks[one.job.id].get(_OUTCOME))
        for one in summaries(store, shown, _SHOWN, sums=_LOSSES)
    ]
    return Page(tuple(items), str(shown[-1].number) if start + limit < len(rows) else None)


def run_facets(store: Store) -> RunFacets:
    """Return the values by which runs can be filtered, with their counts."""
    rows = _all_jobs(store)
    tags = [f"{key}={value}" for job in rows for key, value in job.tags.items()]
    columns = ([job.environment for job in rows], [job.model for job in rows], [job.state for job in rows])
    return RunFacets(*(dict(sorted(Counter(filter(None, one)).items())) for one in (*columns, tags)))


def _all_jobs(store: Store) -> list[JobRow]:
    return list(stored_jobs.find(store, limit=100_000).items)


def _matches(job: JobRow, where: RunFilter) -> bool:
    texts = [job.name, job.id, job.environment, job.model, *job.tags, *job.tags.values()]
    return (
        where.text.lower() in "\n".join(texts).lower()
        and (not where.states or job.state in where.states)
        and where.environment in (None, job.environment)
        and where.model in (None, job.model)
        and all(job.tags.get(key) == value for key, value in where.tags.items())
    )


def summaries(
    store: Store, jobs: Sequence[JobRow], names: Sequence[str], *, sums: Collection[str] = ()
) -> tuple[RunSummary, ...]:
    """Summarise the runs of jobs, in the order of the jobs.

    A summary has the last iteration, the numbers `names` of the last rows, and `sums` over all rows.
    """
    numbers = [job.number for job in jobs]
    last_iterations = (
        select(Iteration.job, func.max(Iteration.iteration), func.max(Iteration.finished))
        .where(Iteration.job.in_(numbers))
        .group_by(Iteration.job)
    )
    with store.read() as connection:
        iterations = {row[0]: row for row in connection.execute(last_iterations)}
        numbers_by_kind = _last_numbers(connection, numbers, names)
        totals = _totals(connection, numbers, sums) if sums else {}
    result = []
    for job in jobs:
        _, last, finished = iterations.get(job.number, (0, 0, None))
        latest, evaluated = (
            numbers_by_kind.get((job.number, kind), {}) for kind in ("iteration", "evaluation")
        )
        result.append(RunSummary(job, last, finished, latest, evaluated, totals.get(job.number, {})))
    return tuple(result)


def _totals(
    connection: Connection, jobs: Sequence[int], names: Collection[str]
) -> dict[int, dict[str, float]]:
    """Sum the named numbers over all rows of every kind, by job."""
    query = (
        select(Curve.job, Curve.name, func.sum(Metric.value))
        .join(Metric, Metric.curve == Curve.number)
        .where(Curve.job.in_(jobs), Curve.name.in_(names))
        .group_by(Curve.job, Curve.name)
    )
    totals: dict[int, dict[str, float]] = {}
    for job, name, value in connection.execute(query):
        totals.setdefault(job, {})[name] = value
    return totals


def _last_numbers(
    connection: Connection, jobs: Sequence[int], names: Sequence[str]
) -> dict[tuple[int, str], dict[str, float]]:
    """Read the named numbers of the last row, by job and kind."""
    last = _last_of(jobs, ("iteration", "evaluation"))
    query = (
        select(Curve.job, Curve.kind, Curve.name, Metric.value)
        .join(last, and_(last.c.job == Curve.job, last.c.kind == Curve.kind))
        .join(Metric, and_(Metric.curve == Curve.number, Metric.iteration == last.c.iteration))
        .where(Curve.name.in_(names))
    )
    numbers: dict[tuple[int, str], dict[str, float]] = {}
    for job, kind, name, value in connection.execute(query):
        numbers.setdefault((job, kind), {})[name] = value
    return numbers


def _last_of(jobs: Iterable[int], kinds: Iterable[str]) -> Subquery:
    """Select the iteration of the last row, by job and kind."""
    return (
        select(MetricRow.job, MetricRow.kind, func.max(MetricRow.iteration).label("iteration"))
        .where(MetricRow.job.in_(jobs), MetricRow.kind.in_(kinds))
        .group_by(MetricRow.job, MetricRow.kind)
        .subquery()
    )


def known_metrics(store: Store, job_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Return (kind, metric) of every curve that any of these runs has."""
    with store.read() as connection:
        query = select(Curve.kind, Curve.name).where(Curve.job.in_(job_numbers(connection, job_ids)))
        return {(kind, name) for kind, name in connection.execute(query.distinct())}


def metric_names(store: Store, job_id: str, kind: str = "iteration") -> tuple[str, ...]:
    """Return the names of a run's curves, sorted."""
    with store.read() as connection:
        query = select(Curve.name).where(Curve.job == job_number(connection, job_id), Curve.kind == kind)
        return tuple(sorted(connection.scalars(query)))


def series(
    store: Store, job_ids: Sequence[str], names: Sequence[str], *, kind: str = "iteration", points: int = 300
) -> dict[str, dict[str, Series]]:
    """Read curves of several runs: by job id, then by metric name. A name without numbers is absent.

    Args:
        names: a name that ends with `/*` matches every name with that prefix (`eval/success_rates/*`).
        points: the maximum per curve; longer curves are reduced to means of intervals, with their bounds.
    """
    starts = tuple(name[:-1] for name in names if name.endswith("/*"))
    with store.read() as connection:
        jobs = job_numbers(connection, job_ids)
        query = select(Curve.number, Curve.job, Curve.name).where(Curve.job.in_(jobs), Curve.kind == kind)
        rows = connection.execute(query)
        curves = {row.number: row for row in rows if row.name in names or row.name.startswith(starts)}
        curves_by_number = _points(connection, list(curves), points)
    result: dict[str, dict[str, Series]] = {job_id: {} for job_id in job_ids}
    for number in sorted(curves_by_number, key=lambda number: curves[number].name):
        result[jobs[curves[number].job]][curves[number].name] = curves_by_number[number]
    return result


def _points(connection: Connection, curves: Sequence[int], points: int) -> dict[int, Series]:
    """Read the points of curves. All use the same intervals, so curves of several runs can be overlaid."""
    mine = Metric.curve.in_(curves)
    last = connection.scalar(select(func.max(Metric.iteration)).where(mine)) or 0
    stride = last // max(points, 1) + 1
    value, iteration = Metric.value, Metric.iteration
    whole = select(Metric.curve, iteration, value, value, value).where(mine).order_by(Metric.curve, iteration)
    stretch = iteration // stride
    thinned = (
        select(Metric.curve, func.max(iteration), func.avg(value), func.min(value), func.max(value))
        .where(mine)
        .group_by(Metric.curve, stretch)
        .order_by(Metric.curve, stretch)
    )
    # The driver's own tuples: converting them to SQLAlchemy rows takes as long as the query.
    cursor = connection.execute(whole if stride == 1 else thinned).cursor
    assert cursor is not None
    points_by_curve = {}
    for curve, rows in groupby(cursor.fetchall(), key=itemgetter(0)):
        _, iterations, means, lows, highs = zip(*rows, strict=True)
        points_by_curve[curve] = Series(iterations, means, lows, highs)
    return points_by_curve


def metric_lines(
    store: Store, job_id: str, *, after: int = 0, kind: str | None = None, limit: int = 200
) -> tuple[MetricLine, ...]:
    """Return rows of metrics.jsonl with a number above `after`, oldest first: the rows a live page lacks."""
    if not fits(after):
        return ()  # no row number is that high
    query = select(*_LINE).where(MetricRow.number > after).order_by(MetricRow.number).limit(limit)
    if kind is not None:
        query = query.where(MetricRow.kind == kind)
    with store.read() as connection:
        query = query.where(MetricRow.job == job_number(connection, job_id))
        return tuple(MetricLine(*row) for row in connection.execute(query))


def newest_lines(store: Store, job_id: str, *, kind: str, limit: int) -> tuple[MetricLine, ...]:
    """Return the rows of the last iterations, oldest first."""
    query = select(*_LINE).where(MetricRow.kind == kind).order_by(MetricRow.iteration.desc()).limit(limit)
    with store.read() as connection:
        query = query.where(MetricRow.job == job_number(connection, job_id))
        return tuple(MetricLine(*row) for row in reversed(connection.execute(query).all()))


def lines_above_zero(
    store: Store, job_id: str, names: Collection[str], *, limit: int
) -> tuple[MetricLine, ...]:
    """Return the newest rows, of every kind, in which one of these numbers is above 0; oldest first."""
    table = MetricRow
    with store.read() as connection:
        query = (
            select(*_LINE)
            .join(Curve, and_(Curve.job == table.job, Curve.kind == table.kind))
            .join(Metric, and_(Metric.curve == Curve.number, Metric.iteration == table.iteration))
            .where(table.job == job_number(connection, job_id), Curve.name.in_(names), Metric.value > 0)
            .order_by(table.number.desc())
            .limit(limit * len(names))
        )
        lines = {row.number: MetricLine(*row) for row in connection.execute(query)}
    return tuple(reversed(list(lines.values())[:limit]))


def last_line(store: Store, job_id: str, kind: str) -> MetricLine | None:
    """Return the newest row of a kind, with its lists (`decision/unique_by_turn`) and texts."""
    return last_lines(store, [job_id], [kind])[job_id].get(kind)


def last_lines(
    store: Store, job_ids: Sequence[str], kinds: Sequence[str]
) -> dict[str, dict[str, MetricLine]]:
    """Return the newest row of each kind, by job id, then by kind. Kinds without rows are absent."""
    table = MetricRow
    with store.read() as connection:
        jobs = job_numbers(connection, job_ids)
        last = _last_of(jobs, kinds).c
        same = and_(last.job == table.job, last.kind == table.kind, last.iteration == table.iteration)
        rows = connection.execute(select(table.job, *_LINE).where(same)).all()
    lines: dict[str, dict[str, MetricLine]] = {job_id: {} for job_id in job_ids}
    for job, *line in rows:
        lines[jobs[job]][line[1]] = MetricLine(*line)
    return lines


def checkpoints(store: Store, job_id: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints of a run, oldest first."""
    with store.read() as connection:
        query = select(*_CHECKPOINT).where(Checkpoint.job == job_number(connection, job_id))
        return tuple(CheckpointRow(*row) for row in connection.execute(query.order_by(Checkpoint.iteration)))
