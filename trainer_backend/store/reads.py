"""Reads of a run's metrics for pages and the API: a query tells where runs lie, the rest is in their files.

Reads of rollouts and decisions: reads_rollouts.py.
"""

import json
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from sqlalchemy import ColumnElement, Text, and_, cast, func, or_, select

from trainer_backend.rundir.checkpoint_paths import best_checkpoint, whole_checkpoints
from trainer_backend.store.database import Store, UnknownJob
from trainer_backend.store.jobs import job_row
from trainer_backend.store.metrics import METRICS_FILE, Mark, MetricsFile, Points, thin_together
from trainer_backend.store.paging import cursor_of, sort_page
from trainer_backend.store.rows import (
    ALL_RUNS,
    CheckpointRow,
    Job,
    MetricLine,
    Page,
    RunFacets,
    RunFilter,
    RunSort,
    RunSummary,
    Series,
)
from trainer_backend.store.tables import JOBS, SYNCED_FILES

MARK = [SYNCED_FILES.c[name] for name in Mark.__slots__]


@dataclass(frozen=True, slots=True)
class _Run:
    """Where a run lies, when its last iteration ended, and how far the store has seen its metrics."""

    run_dir: str | None
    finished: datetime | None
    mark: Mark


def _runs(store: Store, job_ids: Collection[str]) -> dict[str, _Run]:
    """Return the runs of jobs, by job id in the order of the ids."""
    of_metrics = and_(SYNCED_FILES.c.job == JOBS.c.number, SYNCED_FILES.c.name == METRICS_FILE)
    query = select(JOBS.c.id, JOBS.c.run_dir, JOBS.c.finished, *MARK).outerjoin(SYNCED_FILES, of_metrics)
    with store.read() as connection:
        rows = connection.execute(query.where(JOBS.c.id.in_(job_ids))).all()
    runs = {
        job_id: _Run(run_dir, finished, Mark() if mark[0] is None else Mark(*mark))
        for job_id, run_dir, finished, *mark in rows
    }
    missing = next((job_id for job_id in job_ids if job_id not in runs), None)
    if missing is not None:
        raise UnknownJob(f"there is no job {missing[:64]!r}")
    return {job_id: runs[job_id] for job_id in job_ids}


@contextmanager
def _metrics(store: Store, run: _Run) -> Iterator[tuple[MetricsFile, int]]:
    """Hold the metrics of a run, with the number before that of its first row."""
    with store.metrics.open(run.run_dir) as file:
        yield file, file.next_mark(run.mark).base


def summaries(
    store: Store, jobs: Sequence[Job], names: Sequence[str], *, sums: Collection[str] = ()
) -> tuple[RunSummary, ...]:
    """Summarise the runs of jobs, in the order of the jobs.

    A summary has the last iteration, the numbers `names` of the last rows, and `sums` over all rows.
    """
    runs = _runs(store, [job.id for job in jobs])
    result = []
    for job in jobs:
        with _metrics(store, runs[job.id]) as (file, _):
            last = file.last_iteration("iteration")
            finished = runs[job.id].finished if last is not None else None
            latest, evaluated = (file.last_numbers(kind, names) for kind in ("iteration", "evaluation"))
            result.append(RunSummary(job, last or 0, finished, latest, evaluated, file.sums(sums)))
    return tuple(result)


def run_summaries(
    store: Store,
    where: RunFilter = ALL_RUNS,
    *,
    sort: RunSort = "created",
    descending: bool = True,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[RunSummary]:
    """Return a page of the list of runs: one query, and no file. Runs without the sort value come last.

    Args:
        cursor: the cursor of the previous page, for the same filter and order.
    """
    column = "number" if sort == "created" else sort
    query = select(JOBS).where(*_run_conditions(where))
    query = sort_page(query, JOBS.c[column], JOBS.c.number, descending=descending, cursor=cursor, limit=limit)
    with store.read() as connection:
        jobs = [job_row(row) for row in connection.execute(query)]
    items = tuple(_summary(job) for job in jobs[:limit])
    if len(jobs) <= limit:
        return Page(items, None)
    return Page(items, cursor_of(getattr(jobs[limit - 1], column), jobs[limit - 1].number))


def _run_conditions(where: RunFilter) -> Iterator[ColumnElement[bool]]:
    if where.text:
        texts = (JOBS.c.name, JOBS.c.id, JOBS.c.environment, JOBS.c.model)
        found = [text.icontains(where.text, autoescape=True) for text in texts]
        yield or_(*found, _TAGS.icontains(json.dumps(where.text)[1:-1], autoescape=True))
    if where.states:
        yield JOBS.c.state.in_(where.states)
    for column, value in ((JOBS.c.environment, where.environment), (JOBS.c.model, where.model)):
        if value is not None:
            yield column == value
    for name, value in where.tags.items():
        pair = f"{json.dumps(name)}: {json.dumps(value)}"
        # `replace` compares exactly in both databases. SQLite's LIKE ignores case, and its paths in JSON know
        # no name with a quotation mark.
        yield or_(*(func.replace(_TAGS, f"{start}{pair}", "") != _TAGS for start in ("{", ", ")))


_TAGS = cast(JOBS.c.tags, Text)  # as json.dumps wrote them


def _summary(job: Job) -> RunSummary:
    """Return the summary of a run as the last sync has left it (`sync.summarise_metrics`)."""
    found = {name: job.numbers.get(name, {}) for name in ("latest", "evaluated", "sums")}
    spark = None
    if job.numbers.get("spark"):
        iterations_N, values_N = map(tuple, job.numbers["spark"])
        spark = Series(iterations_N, values_N, values_N, values_N)
    return RunSummary(job, job.iteration, job.finished, spark=spark, **found)


def run_facets(store: Store) -> RunFacets:
    """Return the values by which runs can be filtered, each with its number of jobs."""
    columns = (JOBS.c.environment, JOBS.c.model, JOBS.c.state, JOBS.c.tags)
    counts: tuple[Counter[str], ...] = tuple(Counter() for _ in columns)
    with store.read() as connection:
        for *values, tags in connection.execute(select(*columns)):
            for counter, value in zip(counts, values, strict=False):
                counter[value] += 1
            counts[-1].update(f"{name}={value}" for name, value in tags.items())
    return RunFacets(*({key: count for key, count in sorted(found.items()) if key} for found in counts))


def known_metrics(store: Store, job_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Return (kind, metric) of every curve that any of these runs has."""
    curves: set[tuple[str, str]] = set()
    for run in _runs(store, job_ids).values():
        with _metrics(store, run) as (file, _):
            curves |= file.curves
    return curves


def metric_names(store: Store, job_id: str, kind: str = "iteration") -> tuple[str, ...]:
    """Return the names of a run's curves, sorted."""
    return tuple(sorted(name for of, name in known_metrics(store, [job_id]) if of == kind))


def series(
    store: Store, job_ids: Sequence[str], names: Sequence[str], *, kind: str = "iteration", points: int = 300
) -> dict[str, dict[str, Series]]:
    """Return curves by job id, then by name. Names without a curve are absent.

    All curves are thinned by the same intervals, so that those of several runs can be laid over one another.

    Args:
        names: a name that ends in `/*` stands for all that begin so (`eval/success_rates/*`).
        points: the maximum per curve; longer curves are reduced to means of intervals, with their bounds.
    """
    starts = tuple(name[:-1] for name in names if name.endswith("/*"))
    curves: dict[tuple[str, str], Points] = {}
    for job_id, run in _runs(store, job_ids).items():
        with _metrics(store, run) as (file, _):
            for name in sorted(name for of, name in file.curves if of == kind):
                if name in names or name.startswith(starts):
                    curves[job_id, name] = file.points(kind, name)
    found: dict[str, dict[str, Series]] = {job_id: {} for job_id in job_ids}
    for (job_id, name), curve in thin_together(curves, points).items():
        found[job_id][name] = curve
    return found


def metric_lines(
    store: Store, job_id: str, *, after: int = 0, kind: str | None = None, limit: int = 200
) -> tuple[MetricLine, ...]:
    """Return rows of metrics.jsonl with a number above `after`, oldest first: the rows a live page lacks."""
    with _metrics(store, _runs(store, [job_id])[job_id]) as (file, base):
        return file.lines(base, after=after, kind=kind, limit=limit)


def newest_lines(store: Store, job_id: str, *, kind: str, limit: int) -> tuple[MetricLine, ...]:
    """Return the rows of the last iterations, oldest first."""
    with _metrics(store, _runs(store, [job_id])[job_id]) as (file, base):
        return file.newest(base, kind, limit)


def lines_above_zero(
    store: Store, job_id: str, names: Collection[str], *, limit: int
) -> tuple[MetricLine, ...]:
    """Return the newest rows, of every kind, in which one of these numbers is above 0; oldest first."""
    with _metrics(store, _runs(store, [job_id])[job_id]) as (file, base):
        return file.above_zero(base, names, limit)


def last_line(store: Store, job_id: str, kind: str) -> MetricLine | None:
    """Return the newest row of a kind, with its lists (`decision/unique_by_turn`) and texts."""
    return last_lines(store, [job_id], [kind])[job_id].get(kind)


def last_lines(
    store: Store, job_ids: Sequence[str], kinds: Sequence[str]
) -> dict[str, dict[str, MetricLine]]:
    """Return the newest row of each kind, by job id, then by kind. Kinds without rows are absent."""
    lines = {}
    for job_id, run in _runs(store, job_ids).items():
        with _metrics(store, run) as (file, base):
            lines[job_id] = {kind: line for kind in kinds for line in file.newest(base, kind, 1)}
    return lines


def checkpoints(store: Store, job_id: str) -> tuple[CheckpointRow, ...]:
    """Return the checkpoints of a run, oldest first."""
    run_dir = _runs(store, [job_id])[job_id].run_dir
    return () if run_dir is None else tuple(checkpoint_rows(Path(run_dir, "checkpoints")))


def checkpoint_rows(folder: Path) -> list[CheckpointRow]:
    """List the whole checkpoints, oldest first."""
    best = best_checkpoint(folder)
    return [
        CheckpointRow(path.name, iteration, path == best, _size(path))
        for iteration, path in whole_checkpoints(folder)
    ]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # the run is deleting it
    return total
