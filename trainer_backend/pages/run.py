"""The pages of one run: its charts (alone or overlaid with other runs), rollouts, job and log."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, cast, get_args
from urllib.parse import urlencode

from fastapi import Depends, Query, Request
from starlette.datastructures import QueryParams
from starlette.responses import HTMLResponse, JSONResponse, Response

from trainer_backend.collect.losses import FAILED
from trainer_backend.core.metric import Panel
from trainer_backend.pages.address import describe_order, link_list, read_filter, read_order
from trainer_backend.pages.facts import chosen_keys, name_folder
from trainer_backend.pages.page import (
    HEADERS,
    BadAddress,
    frame,
    get_dashboard,
    list_page,
    page,
    page_router,
    takes_part,
)
from trainer_backend.pages.run_data import (
    KINDS,
    MOST_LOSSES,
    Run,
    chart_data,
    panels_for,
    points_for,
    run_data,
)
from trainer_backend.pages.run_view import RATES, list_losses, make_head, seconds_an_iteration
from trainer_backend.pages.series import AXIS_METRICS, EVERY_POINT, add_up_axes, table
from trainer_backend.pages.timeline import SHOWN
from trainer_backend.rundir.state import LOG_FILE, LogLine, read_log, read_state
from trainer_backend.store import jobs, reads, reads_rollouts
from trainer_backend.store.database import Store
from trainer_backend.store.reads_rollouts import RolloutFilter, RolloutSort
from trainer_backend.store.rows import ENDED, Curve, Job

router = page_router()

TABS = (("", "Charts"), ("rollouts", "Rollouts"), ("config", "Job"), ("log", "Log"))
MOST_RUNS = 12  # colours and dashes could mark 36 curves, but readers could not tell them apart
_LOG_LINES = 500
_SORTS = get_args(RolloutSort)
_PAGE = 50  # rollouts
_RATE_POINTS = 60
_FIRST_LINES = 12  # of the log, shown while there are no charts
_MOST_EVALUATIONS = 10_000
_STAGES = ("time/collect_s", "time/credit_s", "time/update_s", "time/publish_s")


@dataclass(frozen=True, slots=True)
class View:
    """The query string of a run's page: runs to overlay, and chart settings. static/charts.js changes it."""

    others: Annotated[tuple[str, ...], Query(alias="with")] = ()
    x: Literal["", "steps", "tokens", "hours"] = ""  # the horizontal axis; empty: iterations
    smooth: Annotated[float, Query(ge=0, le=0.99)] = 0.0
    """Weight of the past in an exponential moving average."""
    log: bool = False
    seeds: Literal["", "apart"] = ""
    pin: str = ""  # the reference run of a comparison

    def query(self, others: Sequence[str]) -> str:
        """Return the query string of this view, but with `others` as the runs to overlay."""
        view = {"x": self.x, "smooth": self.smooth, "log": self.log, "seeds": self.seeds, "pin": self.pin}
        chosen = [(name, str(value)) for name, value in view.items() if value]
        return urlencode([*(("with", other) for other in others), *chosen])


Chosen = Annotated[View, Depends()]


def run_frame(request: Request, job_id: str, tab: str) -> dict[str, Any]:
    """Return the template values that every page of a run needs: its head, and its tabs with `tab` open."""
    dashboard = get_dashboard(request)
    store = dashboard.store
    job = jobs.get(store, job_id)
    # Read the event id first. Rows that arrive during the other reads are then still sent as new events.
    place = _place(store, job)
    (job,) = reads.refresh(store, [job])
    times = reads.series(store, [job_id], _STAGES)[job_id] if job.state == "running" else {}
    state = read_state(Path(job.run_dir)) if job.run_dir else None
    head = make_head(
        job, state, rate_s=seconds_an_iteration(times), place=place, now=dashboard.clock(),
        can_control=dashboard.jobs is not None,
    )  # fmt: skip
    return {"head": head, "tabs": TABS, "tab": tab, **frame(request, "runs")}


@router.get("/runs/{job_id}", response_class=HTMLResponse)
def run(request: Request, job_id: str, view: Chosen) -> Response:
    """Show the charts of a run, or of several overlaid runs."""
    store = get_dashboard(request).store
    alone = {job_id, *view.others} == {job_id}
    runs = [_whole_run(store, jobs.get(store, job_id))] if alone else _runs(store, job_id, view.others)
    ids = [one.job.id for one in runs]
    data = run_data(runs, reads.known_metrics(store, ids), apart=bool(view.seeds), pin=view.pin)
    data |= {"view": view, "query": view.query(ids[1:])}
    if len(runs) > 1:
        for one in data["runs"]:
            first, *rest = [other for other in ids if other != one["id"]]
            one["without"] = f"/runs/{first}?{view.query(rest)}"
        live = any(one.job.state not in ENDED for one in runs)
        return page("compare", live=live, **data, **frame(request, "runs"))
    lines = () if data["sections"] else _read_log(runs[0].job, _FIRST_LINES)[0]
    return page("run", lines=lines, **data, **run_frame(request, job_id, ""))


@router.get("/runs/{job_id}/head", response_class=HTMLResponse)
def head(request: Request, job_id: str) -> Response:
    """Show only the head with state and progress, so that an open page can refresh its own head."""
    return page("head", **run_frame(request, job_id, ""))


@router.get("/runs/{job_id}/charts")
def charts(request: Request, job_id: str, view: Chosen, rest: bool = False) -> JSONResponse:
    """Send the values of the page's charts to static/charts.js.

    With `rest`, send the values of the generated charts, which show the metrics that no panel shows.
    """
    store = get_dashboard(request).store
    runs = _runs(store, job_id, view.others)
    return JSONResponse(_values(store, runs, _panels(store, runs)[int(rest)]), headers=dict(HEADERS))


@router.get("/runs/{job_id}/values", response_class=HTMLResponse)
def values(request: Request, job_id: str, panel: str, view: Chosen) -> Response:
    """Show one chart as a table. For a single run, the table also has the values of the chosen x axis."""
    store = get_dashboard(request).store
    runs = _runs(store, job_id, view.others)
    panels = [item for part in _panels(store, runs) for item in part if item.key == panel]
    drawn = _values(store, runs, panels, AXIS_METRICS if view.x else ())
    if not drawn["charts"]:
        raise BadAddress(f"panel is {panel[:80]!r}; this run has no values for it")
    axis = drawn["axes"].get(view.x) if len(runs) == 1 else None
    return page("values", chart=drawn["charts"][0], rows=table(drawn["charts"][0]), axis=axis)


@router.get("/runs/{job_id}/rest", response_class=HTMLResponse)
def rest(request: Request, job_id: str, view: Chosen) -> Response:
    """Show a generated chart for each metric that no panel of the page shows."""
    store = get_dashboard(request).store
    runs = _runs(store, job_id, view.others)
    return page("rest", panels=_panels(store, runs)[1], query=view.query(view.others), job_id=job_id)


@router.get("/runs/{job_id}/config", response_class=HTMLResponse)
def config(request: Request, job_id: str) -> Response:
    """Show the job as TOML, and the keys whose values are not their defaults."""
    job = jobs.get(get_dashboard(request).store, job_id)
    return page("config", toml=job.config, differs=chosen_keys(job), **run_frame(request, job_id, "config"))


@router.get("/runs/{job_id}/log", response_class=HTMLResponse)
def log(request: Request, job_id: str) -> Response:
    """Show the last lines of the run's log."""
    lines, skipped = _read_log(jobs.get(get_dashboard(request).store, job_id), _LOG_LINES)
    return page("log", lines=lines, skipped=skipped, **run_frame(request, job_id, "log"))


@router.get("/runs/{job_id}/rollouts", response_class=HTMLResponse)
def rollouts(request: Request, job_id: str) -> Response:
    """Show the list of rollouts, filtered and sorted as the query string requests."""
    store = get_dashboard(request).store
    values = list_rollouts(store, job_id, request.query_params)
    # If the request needs only a part of the page, that part does not contain the filters.
    facets = None if takes_part(request) else reads_rollouts.facets(store, job_id)
    return list_page("rollouts", facets=facets, **values, **run_frame(request, job_id, "rollouts"))


def list_rollouts(store: Store, job_id: str, params: QueryParams) -> dict[str, Any]:
    """Return template values for the part of the list of rollouts that a query string selects.

    If it selects lost rollouts, the values include the causes of the losses in each stage.
    """
    where, (sort, down) = read_filter(RolloutFilter, params), read_order(params, _SORTS, "newest")
    rows = reads_rollouts.rollouts(
        store, job_id, where, sort=cast(RolloutSort, sort), descending=down,
        cursor=params.get("cursor") or None, limit=_PAGE,
    )  # fmt: skip
    total, whole = reads_rollouts.count_rollouts(store, job_id, where)
    counted = f"{total:,}" if whole else f"more than {total:,}"
    links = link_list(
        f"/runs/{job_id}/rollouts", params, sort=sort, down=down, sorts=_SORTS, cursor=rows.cursor
    )
    lossy = reads.lines_above_zero(store, job_id, FAILED, limit=MOST_LOSSES) if where.lost else ()
    return {
        "rows": rows.items,
        "caption": f"{len(rows.items)} of {counted} rollouts, {describe_order(sort, down, 'newest')}",
        "chosen": where, "filtered": where != RolloutFilter(), "sorts": _SORTS,
        "losses": list_losses([line.whole for line in lossy]),
        **links,
    }  # fmt: skip


def _read_log(job: Job, last: int) -> tuple[list[LogLine], int]:
    return read_log(Path(job.run_dir), last=last) if job.run_dir else ([], 0)


def _runs(store: Store, job_id: str, others: Sequence[str]) -> list[Run]:
    """Read the job, the name and the last metrics rows of a run and of each run in `others`."""
    ids = list(dict.fromkeys((job_id, *others)))
    if len(ids) > MOST_RUNS:
        raise BadAddress(f"{len(ids)} runs are laid over one another; at most {MOST_RUNS} can be told apart")
    rows = [jobs.get(store, one) for one in ids]
    last = reads.last_lines(store, ids, KINDS)
    return [
        Run(job, name, [line.whole for line in last[job.id].values()])
        for job, name in zip(rows, name_runs(rows), strict=True)
    ]


def _whole_run(store: Store, job: Job) -> Run:
    """Read what the page of one run shows, except for the curves of its charts."""
    lines = {
        line.number: line
        for lines in (
            reads.metric_lines(store, job.id, kind="iteration", limit=1),
            reads.lines_above_zero(store, job.id, FAILED, limit=MOST_LOSSES),
            reads.metric_lines(store, job.id, kind="evaluation", limit=_MOST_EVALUATIONS),
            reads.newest_lines(store, job.id, kind="iteration", limit=SHOWN),
        )
        for line in lines
    }
    checkpoints = reads.checkpoints(job)
    return Run(
        job, job.name, [lines[number].whole for number in sorted(lines)],
        reads.series(store, [job.id], [f"{RATES}*"], kind="evaluation", points=_RATE_POINTS)[job.id],
        next((row.iteration for row in checkpoints if row.best), None), checkpoints,
    )  # fmt: skip


def _panels(store: Store, runs: Sequence[Run]) -> tuple[list[Panel], list[Panel]]:
    return panels_for(runs, reads.known_metrics(store, [run.job.id for run in runs]))


def _values(
    store: Store, runs: Sequence[Run], panels: Sequence[Panel], axis_metrics: Sequence[str] = AXIS_METRICS
) -> dict[str, Any]:
    """Read the values of the panels, with one query per kind of metrics rows, and the values of the axes."""
    ids = [run.job.id for run in runs]
    curves: list[dict[tuple[str, str], Curve]] = [{} for _ in ids]
    for kind in KINDS:
        lines = [line for panel in panels for line in panel.lines if line.kind == kind]
        names = sorted({name for line in lines for name in line.metrics})
        if not names:
            continue
        found = reads.series(store, ids, names, kind=kind, points=points_for(len(runs)))
        for own, series in zip(curves, found.values(), strict=True):
            own |= {(kind, name): one for name, one in series.items()}
    axes = reads.series(store, ids, axis_metrics, points=EVERY_POINT).values()
    return chart_data(runs, curves, [add_up_axes(_by_iteration(own)) for own in axes], panels)


def _by_iteration(series: Mapping[str, Curve]) -> dict[int, dict[str, float]]:
    rows: dict[int, dict[str, float]] = {}
    for name, one in series.items():
        for at, value in zip(one.iterations, one.values, strict=True):
            rows.setdefault(at, {})[name] = value
    return rows


def name_runs(runs: Sequence[Job]) -> list[str]:
    """Name each run by its job, or by its folder if another run has the same job name."""
    names = [job.name for job in runs]
    return [job.name if names.count(job.name) == 1 else name_folder(job) for job in runs]


def _place(store: Store, job: Job) -> str:
    """Return the event id (jobs/events.py) that marks the current end of the metrics rows and of the log."""
    lines = reads.last_lines(store, [job.id], KINDS)[job.id].values()
    row, size = max((line.number for line in lines), default=0), 0
    with suppress(FileNotFoundError):
        size = (Path(job.run_dir) / LOG_FILE).stat().st_size if job.run_dir else 0
    return f"{row}.{size}"
