"""Pages of one run: its charts, alone or beside other runs, its job and its log, and their queries."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from trainer_backend.collect.metrics import outcome_name
from trainer_backend.pages.facts import chosen_keys, differing_keys, folder_of
from trainer_backend.pages.page import HEADERS, BadAddress, Dashboard, dashboard_of, frame, page, page_router
from trainer_backend.pages.panels import PANELS, Panel, found_in, metrics_of, named_by, one_line_each, rest_of
from trainer_backend.pages.run_view import (
    RATES,
    Ends,
    Head,
    ends_of,
    evaluation_table,
    head_of,
    key_figures,
    log_lines,
    seconds_an_iteration,
    success_rates,
)
from trainer_backend.pages.series import Chart, Curves, chart_of, table
from trainer_backend.rundir.state import LOG_FILE, LogLine, read_log, read_state
from trainer_backend.store import jobs, reads
from trainer_backend.store.database import Store
from trainer_backend.store.rows import ENDED, JobRow, Series

router = page_router()

TABS = (("", "Charts"), ("rollouts", "Rollouts"), ("config", "Job"), ("log", "Log"))
DASHES = ("", "6 3", "2 3", "8 3 2 3", "1 5", "12 4")
_MOST_OTHERS = 5
_LOG_LINES = 500
_RATE_POINTS = 60
_FIRST_LINES = 12  # shown in place of charts, as long as there are none

With = Annotated[tuple[str, ...], Query(alias="with")]


def run_frame(request: Request, job_id: str, tab: str) -> dict[str, Any]:
    """What every page of a run begins with."""
    return {
        "head": run_head(dashboard_of(request), job_id),
        "tabs": TABS,
        "tab": tab,
        **frame(request, "runs"),
    }


@router.get("/runs/{job_id}", response_class=HTMLResponse)
def run(request: Request, job_id: str, others: With = ()) -> Response:
    """Charts of a run; or of several, laid over one another."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels, rest = panels_of(store, [item.id for item in runs])
    if len(runs) > 1:
        return page(
            "compare", panels=panels, rest=len(rest), query=_query(others), overlaid=_overlaid(runs),
            live=any(item.state not in ENDED for item in runs),
            differs=differing_keys([item.config for item in runs]), **frame(request, "runs"),
        )  # fmt: skip
    return page(
        "run",
        panels=panels,
        rest=len(rest),
        checkpoints=reads.checkpoints(store, job_id),
        lines=() if panels else log_lines(_told(runs[0], _FIRST_LINES)[0]),
        **figures_of(
            iteration_ends(store, job_id),
            evaluations(store, job_id),
            _rate_curves(store, job_id),
        ),
        **run_frame(request, job_id, ""),
    )


def figures_of(
    iterations: Ends, evaluations: Sequence[Mapping[str, Any]], rates: Mapping[str, Series]
) -> dict[str, Any]:
    """The figures and tables of the page of a run.

    Args:
        rates: curves of the success rates over the evaluations, by metric.
    """
    held_out = ends_of(evaluations)
    return {
        "key": key_figures(iterations, held_out, outcome_name(held_out.last or iterations.last)),
        "rates": success_rates(held_out, rates),
        "evaluations": evaluation_table(evaluations),
    }


@router.get("/runs/{job_id}/head", response_class=HTMLResponse)
def head(request: Request, job_id: str) -> Response:
    """State and progress alone: what a page of the run asks for again."""
    return page("head", **run_frame(request, job_id, ""))


@router.get("/runs/{job_id}/charts")
def charts(
    request: Request,
    job_id: str,
    others: With = (),
    rest: bool = False,
) -> JSONResponse:
    """Every chart's values, as static/charts.js draws them."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels = panels_of(store, [item.id for item in runs])[int(rest)]
    drawn = run_charts(store, runs, panels)
    return JSONResponse({"charts": [chart.as_json() for chart in drawn]}, headers=dict(HEADERS))


@router.get("/runs/{job_id}/values", response_class=HTMLResponse)
def values(request: Request, job_id: str, panel: str, others: With = ()) -> Response:
    """One chart as a table."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    known = chain(*panels_of(store, [item.id for item in runs]))
    chosen = [item for item in known if item.key == panel]
    drawn = run_charts(store, runs, chosen)
    if not drawn:
        raise BadAddress(f"panel is {panel[:80]!r}, of which this run has no values")
    return page("values", chart=drawn[0], rows=table(drawn[0]))


@router.get("/runs/{job_id}/rest", response_class=HTMLResponse)
def rest(request: Request, job_id: str, others: With = ()) -> Response:
    """Charts of all that stands in no panel."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    _, panels = panels_of(store, [item.id for item in runs])
    return page("rest", panels=panels, query=_query(others), job_id=job_id)


@router.get("/runs/{job_id}/config", response_class=HTMLResponse)
def config(request: Request, job_id: str) -> Response:
    """The job with every key, and those that are not at their defaults."""
    job = jobs.get(dashboard_of(request).store, job_id)
    return page("config", toml=job.config, differs=chosen_keys(job), **run_frame(request, job_id, "config"))


@router.get("/runs/{job_id}/log", response_class=HTMLResponse)
def log(request: Request, job_id: str) -> Response:
    """What the run told a person, its last lines."""
    job = jobs.get(dashboard_of(request).store, job_id)
    told, earlier = _told(job, _LOG_LINES)
    return page(
        "log",
        lines=log_lines(told),
        skipped=earlier,
        **run_frame(request, job_id, "log"),
    )


def _rate_curves(store: Store, job_id: str) -> Mapping[str, Series]:
    found = reads.series(store, [job_id], [f"{RATES}*"], kind="evaluation", points=_RATE_POINTS)
    return found[job_id]


def _told(job: JobRow, last: int) -> tuple[list[LogLine], int]:
    return read_log(Path(job.run_dir), last=last) if job.run_dir else ([], 0)


def _runs(store: Store, job_id: str, others: Sequence[str]) -> list[JobRow]:
    if len(others) > _MOST_OTHERS:
        raise BadAddress(
            f"{len(others)} runs are laid over this one; at most {_MOST_OTHERS} can be told apart"
        )
    return [jobs.get(store, one) for one in dict.fromkeys((job_id, *others))]


def _query(others: Sequence[str]) -> str:
    return urlencode([("with", other) for other in others])


def _overlaid(runs: Sequence[JobRow]) -> list[dict[str, str]]:
    """Name and sign of each run, and the address without it."""
    shown = []
    for index, (job, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        left = [item.id for item in runs if item is not job]
        without = f"/runs/{left[0]}?{_query(left[1:])}" if left else ""
        shown.append(
            {"id": job.id, "name": name, "state": job.state, "dashes": DASHES[index % 6], "without": without}
        )
    return shown


POINTS = 400  # of all runs of a chart together, and one run has as many: it is some 400 pixels wide
_MOST_EVALUATIONS = 10_000
_STAGES = ("time/collect_s", "time/credit_s", "time/update_s", "time/publish_s")
_KINDS = ("iteration", "evaluation")


def run_head(dashboard: Dashboard, job_id: str) -> Head:
    """
    Raises:
        UnknownJob: there is none of that id.
    """
    job = jobs.get(dashboard.store, job_id)
    place = _place(dashboard.store, job)  # before anything else is read: what comes meanwhile is then news
    (summary,) = reads.summaries(dashboard.store, [job], ())
    times = reads.series(dashboard.store, [job_id], _STAGES)[job_id] if job.state == "running" else {}
    state = read_state(Path(job.run_dir)) if job.run_dir else None
    return head_of(
        job, state, iteration=summary.iteration, rate_s=seconds_an_iteration(times), place=place,
        now=dashboard.clock(), can_control=dashboard.jobs is not None,
    )  # fmt: skip


def panels_of(store: Store, job_ids: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels with data in these runs, and generated panels for all other metrics."""
    of_runs = reads.last_lines(store, job_ids, _KINDS).values()
    names = {outcome_name(_row(line)) for lines in of_runs for line in lines.values()}
    return panels_for(reads.known_metrics(store, job_ids), names, runs=len(job_ids))


def panels_for(
    metrics: Iterable[tuple[str, str]], outcomes: Collection[str], *, runs: int
) -> tuple[list[Panel], list[Panel]]:
    """Return the panels for these metrics, and generated panels for metrics that no panel names.

    Args:
        metrics: (kind, metric) pairs.
        outcomes: the names of the runs' outcomes; if they differ, panels say just "outcome".
    """
    known = sorted(known for known in metrics if known[0] in _KINDS)
    outcome = next(iter(outcomes)) if len(outcomes) == 1 else outcome_name(None)
    found = named_by(found_in(PANELS, known), outcome)
    return found if runs == 1 else one_line_each(found), rest_of(known)


def run_charts(store: Store, runs: Sequence[JobRow], panels: Sequence[Panel]) -> list[Chart]:
    """Panels with their values; two queries for all of them and all runs."""
    ids = [job.id for job in runs]
    found = {
        kind: reads.series(store, ids, _names(panels, kind), kind=kind, points=POINTS // len(runs))
        for kind in _KINDS
    }
    named: list[tuple[str, Curves]] = [
        (name, {(kind, metric): series for kind in _KINDS for metric, series in found[kind][job.id].items()})
        for name, job in zip(names_of(runs), runs, strict=True)
    ]
    return charts_of(named, panels)


def charts_of(runs: Sequence[tuple[str, Curves]], panels: Iterable[Panel]) -> list[Chart]:
    """The panels that have values in one of the runs, which are given by name."""
    drawn = (chart_of(panel, runs) for panel in panels)
    return [chart for chart in drawn if chart is not None]


def names_of(runs: Sequence[JobRow]) -> list[str]:
    """Names that tell the runs apart: the job's, with the folder's where two are called the same."""
    names = [job.name for job in runs]
    return [job.name if names.count(job.name) == 1 else folder_of(job) for job in runs]


def iteration_ends(store: Store, job_id: str) -> Ends:
    """The first and the last iteration."""
    first = reads.metric_lines(store, job_id, kind="iteration", limit=1)
    last = reads.last_line(store, job_id, "iteration")
    return Ends(_row(first[0]) if first else None, _row(last) if last else None)


def evaluations(store: Store, job_id: str) -> list[dict[str, Any]]:
    """All of them, oldest first."""
    found = reads.metric_lines(store, job_id, kind="evaluation", limit=_MOST_EVALUATIONS)
    return [_row(line) for line in found]


def _place(store: Store, job: JobRow) -> str:
    """How far the store and the log have come, as the stream of events counts it (jobs/events.py)."""
    lines = reads.last_lines(store, [job.id], _KINDS)[job.id].values()
    row = max((line.number for line in lines), default=0)
    return f"{row}.{_size(Path(job.run_dir) / LOG_FILE) if job.run_dir else 0}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _row(line: Any) -> dict[str, Any]:
    return {**line.row, "kind": line.kind, "iteration": line.iteration}


def _names(panels: Sequence[Panel], kind: str) -> list[str]:
    return sorted(
        {name for panel in panels for line in panel.lines if line.kind == kind for name in metrics_of(line)}
    )
