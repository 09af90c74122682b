"""Pages of one run: its charts, alone or with other runs, its job and its log."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, get_args
from urllib.parse import urlencode

from fastapi import Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from trainer_backend.collect.losses import FAILED, FINISHED, sum_losses
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.pages.facts import chosen_keys, differing_keys, folder_of
from trainer_backend.pages.page import HEADERS, BadAddress, dashboard_of, frame, page, page_router
from trainer_backend.pages.panels import PANELS, Kind, Panel, merge_outcome, rest_of, restrict, split_by_line
from trainer_backend.pages.run_view import (
    MOST_LOSSES,
    RATES,
    Ends,
    ends_of,
    evaluation_table,
    head_of,
    key_figures,
    list_losses,
    seconds_an_iteration,
    success_rates,
)
from trainer_backend.pages.series import Chart, Curves, chart_of, table
from trainer_backend.pages.timeline import SHOWN, timeline_of
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
    """The values that the head of every page of a run needs."""
    dashboard = dashboard_of(request)
    store = dashboard.store
    job = jobs.get(store, job_id)
    # Read the place first: rows that arrive during the other reads are then still sent as news.
    place = _place(store, job)
    (summary,) = reads.summaries(store, [job], (), sums=(*FAILED, *FINISHED))
    times = reads.series(store, [job_id], _STAGES)[job_id] if job.state == "running" else {}
    state = read_state(Path(job.run_dir)) if job.run_dir else None
    head = head_of(
        job, state, iteration=summary.iteration, rate_s=seconds_an_iteration(times), place=place,
        now=dashboard.clock(), can_control=dashboard.jobs is not None, losses=sum_losses(summary.sums),
    )  # fmt: skip
    return {"head": head, "tabs": TABS, "tab": tab, **frame(request, "runs")}


@router.get("/runs/{job_id}", response_class=HTMLResponse)
def run(request: Request, job_id: str, others: With = ()) -> Response:
    """Show the charts of a run, or of several runs laid over one another."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels, rest = panels_of(store, [item.id for item in runs])
    if len(runs) > 1:
        return page(
            "compare", panels=panels, rest=len(rest), query=_query(others), overlaid=_overlaid(runs),
            live=any(item.state not in ENDED for item in runs),
            differs=differing_keys([item.config for item in runs]), **frame(request, "runs"),
        )  # fmt: skip
    checkpoints = reads.checkpoints(store, job_id)
    first_lines = reads.metric_lines(store, job_id, kind="iteration", limit=1)
    last_line = reads.last_line(store, job_id, "iteration")
    held_out = reads.metric_lines(store, job_id, kind="evaluation", limit=_MOST_EVALUATIONS)
    return page(
        "run",
        panels=panels,
        rest=len(rest),
        checkpoints=checkpoints,
        lines=() if panels else _log_of(runs[0], _FIRST_LINES)[0],
        **figures_of(
            Ends(_row(first_lines[0]) if first_lines else None, _row(last_line) if last_line else None),
            [_row(line) for line in held_out],
            reads.series(store, [job_id], [f"{RATES}*"], kind="evaluation", points=_RATE_POINTS)[job_id],
            newest=[_row(line) for line in reads.newest_lines(store, job_id, kind="iteration", limit=SHOWN)],
            best=next((row.iteration for row in checkpoints if row.best), None),
            lossy=[_row(line) for line in reads.lines_above_zero(store, job_id, FAILED, limit=MOST_LOSSES)],
        ),
        **run_frame(request, job_id, ""),
    )


def figures_of(
    iterations: Ends,
    evaluations: Sequence[Mapping[str, Any]],
    rates: Mapping[str, Series],
    *,
    newest: Sequence[Mapping[str, Any]],
    lossy: Sequence[Mapping[str, Any]],
    best: int | None,
) -> dict[str, Any]:
    """The figures and tables of the page of a run.

    Args:
        rates: curves of the success rates over the evaluations, by metric.
        newest: rows of the last iterations, the oldest first.
        lossy: rows of stages that lost rollouts, the oldest first.
        best: the iteration of the best checkpoint.
    """
    held_out = ends_of(evaluations)
    return {
        "key": key_figures(iterations, held_out, outcome_name(held_out.last or iterations.last)),
        "rates": success_rates(held_out, rates),
        "evaluations": evaluation_table(evaluations, best),
        "timeline": timeline_of(newest, evaluations),
        "losses": list_losses(lossy),
    }


@router.get("/runs/{job_id}/head", response_class=HTMLResponse)
def head(request: Request, job_id: str) -> Response:
    """Show state and progress alone, for a page that refreshes its head."""
    return page("head", **run_frame(request, job_id, ""))


@router.get("/runs/{job_id}/charts")
def charts(request: Request, job_id: str, others: With = (), rest: bool = False) -> JSONResponse:
    """Send the values of every chart, as static/charts.js reads them."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels = panels_of(store, [item.id for item in runs])[int(rest)]
    body = {"charts": [chart.as_json() for chart in run_charts(store, runs, panels)]}
    return JSONResponse(body, headers=dict(HEADERS))


@router.get("/runs/{job_id}/values", response_class=HTMLResponse)
def values(request: Request, job_id: str, panel: str, others: With = ()) -> Response:
    """Show one chart as a table."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels = chain(*panels_of(store, [item.id for item in runs]))
    charts = run_charts(store, runs, [item for item in panels if item.key == panel])
    if not charts:
        raise BadAddress(f"panel is {panel[:80]!r}; this run has no values for it")
    return page("values", chart=charts[0], rows=table(charts[0]))


@router.get("/runs/{job_id}/rest", response_class=HTMLResponse)
def rest(request: Request, job_id: str, others: With = ()) -> Response:
    """Show charts of the metrics that no panel names."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    _, panels = panels_of(store, [item.id for item in runs])
    return page("rest", panels=panels, query=_query(others), job_id=job_id)


@router.get("/runs/{job_id}/config", response_class=HTMLResponse)
def config(request: Request, job_id: str) -> Response:
    """Show the job, and its keys that are not at their defaults."""
    job = jobs.get(dashboard_of(request).store, job_id)
    return page("config", toml=job.config, differs=chosen_keys(job), **run_frame(request, job_id, "config"))


@router.get("/runs/{job_id}/log", response_class=HTMLResponse)
def log(request: Request, job_id: str) -> Response:
    """Show the last lines of the run's log."""
    lines, skipped = _log_of(jobs.get(dashboard_of(request).store, job_id), _LOG_LINES)
    return page("log", lines=lines, skipped=skipped, **run_frame(request, job_id, "log"))


def _log_of(job: JobRow, last: int) -> tuple[list[LogLine], int]:
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
    """The name and dashes of each run, and the address of the page without it."""
    entries = []
    for index, (job, name) in enumerate(zip(runs, names_of(runs), strict=True)):
        first, *others = [item.id for item in runs if item is not job]
        entries.append(
            {
                "id": job.id, "name": name, "state": job.state, "dashes": DASHES[index % 6],
                "without": f"/runs/{first}?{_query(others)}",
            }
        )  # fmt: skip
    return entries


POINTS = 400  # of a chart, shared by its runs: a chart is some 400 pixels wide
_MOST_EVALUATIONS = 10_000
_STAGES = ("time/collect_s", "time/credit_s", "time/update_s", "time/publish_s")
_KINDS = get_args(Kind)


def panels_of(store: Store, job_ids: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels that these runs have values for, and generated panels for all other metrics."""
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
    pairs = sorted(pair for pair in metrics if pair[0] in _KINDS)
    outcome = next(iter(outcomes)) if len(outcomes) == 1 else outcome_name(None)
    panels = merge_outcome(restrict(PANELS, pairs), outcome)
    return panels if runs == 1 else split_by_line(panels), rest_of(pairs)


def run_charts(store: Store, runs: Sequence[JobRow], panels: Sequence[Panel]) -> list[Chart]:
    """Read the values of panels, with two queries for all panels and runs."""
    ids = [job.id for job in runs]
    lines = [line for panel in panels for line in panel.lines]
    names = {
        kind: sorted({name for one in lines if one.kind == kind for name in one.metrics}) for kind in _KINDS
    }
    series = {
        kind: reads.series(store, ids, names[kind], kind=kind, points=POINTS // len(runs)) for kind in _KINDS
    }
    curves: list[tuple[str, Curves]] = [
        (name, {(kind, metric): one for kind in _KINDS for metric, one in series[kind][job.id].items()})
        for name, job in zip(names_of(runs), runs, strict=True)
    ]
    return charts_of(curves, panels)


def charts_of(runs: Sequence[tuple[str, Curves]], panels: Iterable[Panel]) -> list[Chart]:
    """Draw the panels that have values in at least one of the runs, given as (name, curves)."""
    charts = (chart_of(panel, runs) for panel in panels)
    return [chart for chart in charts if chart is not None]


def names_of(runs: Sequence[JobRow]) -> list[str]:
    """Name each run by its job, or by its folder if another run has the same job name."""
    names = [job.name for job in runs]
    return [job.name if names.count(job.name) == 1 else folder_of(job) for job in runs]


def _place(store: Store, job: JobRow) -> str:
    """The end of the store's rows and of the log, in the form of an event id (jobs/events.py)."""
    lines = reads.last_lines(store, [job.id], _KINDS)[job.id].values()
    row, size = max((line.number for line in lines), default=0), 0
    with suppress(FileNotFoundError):
        size = (Path(job.run_dir) / LOG_FILE).stat().st_size if job.run_dir else 0
    return f"{row}.{size}"


def _row(line: Any) -> dict[str, Any]:
    return {**line.row, "kind": line.kind, "iteration": line.iteration}
