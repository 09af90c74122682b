"""Reads the metrics of runs for pages and the API: the store knows the run directories, files have the rows.

reads_rollouts.py reads rollouts and decisions.
"""

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from sqlalchemy import ColumnElement, Text, and_, cast, func, or_, select

from trainer_backend.rundir.checkpoint_paths import best_checkpoint, whole_checkpoints
from trainer_backend.store.database import Store, UnknownJob
from trainer_backend.store.jobs import job_row
from trainer_backend.store.metrics import METRICS_FILE, Mark, MetricsFile, Points, summarise, thin_together
from trainer_backend.store.paging import make_page, sort_page
from trainer_backend.store.rows import CheckpointRow, Curve, Job, JobState, MetricLine, Page
from trainer_backend.store.tables import JOBS, SYNCED_FILES

Found = TypeVar("Found")
MARK = [SYNCED_FILES.c[name] for name in Mark.__slots__]


RunSort = Literal["created", "name", "state", "iteration", "finished", "outcome", "evaluation"]


@dataclass(frozen=True, slots=True)
class RunFilter:
    """Conditions that a run must all meet. An empty field is no condition."""

    text: str = ""  # part of name, id, environment, model or a tag, case-insensitive
    states: frozenset[JobState] = frozenset()  # the run is in one of these states
    environment: str | None = None
    model: str | None = None
    tags: Mapping[str, str] = field(default_factory=dict)  # the run has all of these tags


def _look(
    store: Store, job_ids: Sequence[str], look: Callable[[MetricsFile, int], Found]
) -> dict[str, Found]:
    """Call `look` for the metrics of each run; return the results by job id, in the order of `job_ids`.

    `look` receives the file of metrics and its current `Mark.base`.
    """
    of_metrics = and_(SYNCED_FILES.c.job == JOBS.c.number, SYNCED_FILES.c.name == METRICS_FILE)
    query = select(JOBS.c.id, JOBS.c.run_dir, *MARK).outerjoin(SYNCED_FILES, of_metrics)
    with store.read() as connection:
        runs = {row[0]: row[1:] for row in connection.execute(query.where(JOBS.c.id.in_(job_ids)))}
    missing = next((job_id for job_id in job_ids if job_id not in runs), None)
    if missing is not None:
        raise UnknownJob(f"there is no job {missing[:64]!r}")
    found = {}
    for job_id in job_ids:
        run_dir, *mark = runs[job_id]
        with store.metrics.open(run_dir) as file:
            seen = Mark() if mark[0] is None else Mark(*mark)
            found[job_id] = look(file, file.next_mark(seen).base)
    return found


def refresh(store: Store, jobs: Sequence[Job]) -> list[Job]:
    """Return the jobs with values from their current metrics, which may be newer than the last sync."""
    found = _look(store, [job.id for job in jobs], lambda file, _: summarise(file))
    return [job.model_copy(update=found[job.id]) for job in jobs]


def runs(
    store: Store,
    where: RunFilter = RunFilter(),
    *,
    sort: RunSort = "created",
    descending: bool = True,
    cursor: str | None = None,
    limit: int = 50,
) -> Page[Job]:
    """Return a page of the list of runs with one query, without reading files.

    Runs without a sort value come last.
    """
    column = "number" if sort == "created" else sort
    query = select(JOBS).where(*_run_conditions(where))
    query = sort_page(query, JOBS.c[column], JOBS.c.number, descending=descending, cursor=cursor, limit=limit)
    with store.read() as connection:
        jobs = [job_row(row) for row in connection.execute(query)]
    return make_page(jobs, column, limit)


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
        # The run has the tag if `replace` changes the text. In both databases `replace` compares exactly.
        # SQLite's LIKE ignores case, and its JSON paths cannot express a name with a quotation mark.
        yield or_(*(func.replace(_TAGS, f"{start}{pair}", "") != _TAGS for start in ("{", ", ")))


_TAGS = cast(JOBS.c.tags, Text)  # as json.dumps wrote them


def run_facets(store: Store) -> dict[str, dict[str, int]]:
    """Return the number of jobs for each value by which runs can be filtered.

    The outer keys are `environments`, `models`, `states` and `tags`; a tag is written `name=value`.
    """
    query = select(JOBS.c.environment, JOBS.c.model, JOBS.c.state, JOBS.c.tags)
    counts: dict[str, Counter[str]] = {
        name: Counter() for name in ("environments", "models", "states", "tags")
    }
    with store.read() as connection:
        for *values, tags in connection.execute(query):
            pairs = [f"{name}={value}" for name, value in tags.items()]
            for counter, own in zip(counts.values(), (*([value] for value in values), pairs), strict=True):
                counter.update(filter(None, own))
    return {name: dict(sorted(counter.items())) for name, counter in counts.items()}


def known_metrics(store: Store, job_ids: Sequence[str]) -> set[tuple[str, str]]:
    """Return (kind, name) of every curve that at least one of these runs has."""
    return set().union(*_look(store, job_ids, lambda file, _: file.curves).values())


def metric_names(store: Store, job_id: str, kind: str = "iteration") -> tuple[str, ...]:
    """Return the sorted names of a run's curves of one kind."""
    return tuple(sorted(name for of, name in known_metrics(store, [job_id]) if of == kind))


def series(
    store: Store, job_ids: Sequence[str], names: Sequence[str], *, kind: str = "iteration", points: int = 300
) -> dict[str, dict[str, Curve]]:
    """Return curves by job id, then by name. Names without a curve are absent.

    A name that ends in `/*` matches all names with that prefix (`eval/success_rates/*`). If necessary,
    curves are reduced to at most `points` points, each the mean, minimum and maximum of an interval. All
    curves have the same intervals, so that several runs can be overlaid.
    """
    starts = tuple(name[:-1] for name in names if name.endswith("/*"))

    def curves(file: MetricsFile, _: int) -> dict[str, Points]:
        own = sorted(name for of, name in file.curves if of == kind)
        return {name: file.points(kind, name) for name in own if name in names or name.startswith(starts)}

    read = _look(store, job_ids, curves)
    together = {(job_id, name): curve for job_id, own in read.items() for name, curve in own.items()}
    found: dict[str, dict[str, Curve]] = {job_id: {} for job_id in job_ids}
    for (job_id, name), curve in thin_together(together, points).items():
        found[job_id][name] = curve
    return found


def metric_lines(
    store: Store, job_id: str, *, after: int = 0, kind: str | None = None, limit: int = 200
) -> tuple[MetricLine, ...]:
    """Return the first `limit` rows of metrics.jsonl whose row number is above `after`, for live pages."""
    found = _look(store, [job_id], lambda file, base: file.lines(base, after=after, kind=kind, limit=limit))
    return found[job_id]


def lines_above_zero(
    store: Store, job_id: str, names: Collection[str], *, limit: int
) -> tuple[MetricLine, ...]:
    """Return the last `limit` rows, of any kind, in which a named number is above 0; oldest first."""
    return _look(store, [job_id], lambda file, base: file.above_zero(base, names, limit))[job_id]


def newest_lines(store: Store, job_id: str, *, kind: str, limit: int) -> tuple[MetricLine, ...]:
    """Return the rows of one kind for its last `limit` iterations, oldest first."""
    return _look(store, [job_id], lambda file, base: file.newest(base, kind, limit))[job_id]


def last_lines(
    store: Store, job_ids: Sequence[str], kinds: Sequence[str]
) -> dict[str, dict[str, MetricLine]]:
    """Return the newest row of each kind, by job id, then by kind. Kinds without rows are absent."""
    return _look(
        store,
        job_ids,
        lambda file, base: {kind: line for kind in kinds for line in file.newest(base, kind, 1)},
    )


def checkpoints(job: Job) -> list[CheckpointRow]:
    """Return the complete checkpoints of a run, oldest first; none without a run directory."""
    return checkpoint_rows(Path(job.run_dir, "checkpoints")) if job.run_dir else []


def checkpoint_rows(folder: Path) -> list[CheckpointRow]:
    """Return the complete checkpoints in a folder, oldest first."""
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
