"""Pages of one run: its charts, alone or with others laid over them, its job and its log."""

from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import Query, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from trainer_backend.dashboard import run_data
from trainer_backend.dashboard.config_view import chosen_keys, differing_keys
from trainer_backend.dashboard.errors import BadAddress
from trainer_backend.dashboard.key_view import Ends, ends_of, key_figures
from trainer_backend.dashboard.log_view import log_lines
from trainer_backend.dashboard.rates_view import RATES, evaluation_table, success_rates
from trainer_backend.dashboard.rendering import HEADERS, page
from trainer_backend.dashboard.routing import frame, page_router
from trainer_backend.dashboard.series import table
from trainer_backend.dashboard.services import dashboard_of
from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.rundir.run_log import LogLine, read_log
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
        "head": run_data.head(dashboard_of(request), job_id),
        "tabs": TABS,
        "tab": tab,
        **frame(request, "runs"),
    }


@router.get("/runs/{job_id}", response_class=HTMLResponse)
def run(request: Request, job_id: str, others: With = ()) -> Response:
    """Charts of a run; or of several, laid over one another."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    panels, rest = run_data.panels_of(store, [item.id for item in runs])
    if len(runs) > 1:
        return page(
            "compare", panels=panels, rest=len(rest), query=_query(others), overlaid=_overlaid(runs),
            live=any(item.state not in ENDED for item in runs), differs=differing_keys(runs),
            **frame(request, "runs"),
        )  # fmt: skip
    return page(
        "run",
        panels=panels,
        rest=len(rest),
        checkpoints=reads.checkpoints(store, job_id),
        lines=() if panels else log_lines(_told(runs[0], _FIRST_LINES)[0]),
        **figures_of(
            run_data.iteration_ends(store, job_id),
            run_data.evaluations(store, job_id),
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
    panels = run_data.panels_of(store, [item.id for item in runs])[int(rest)]
    drawn = run_data.charts(store, runs, panels)
    return JSONResponse({"charts": [chart.as_json() for chart in drawn]}, headers=dict(HEADERS))


@router.get("/runs/{job_id}/values", response_class=HTMLResponse)
def values(request: Request, job_id: str, panel: str, others: With = ()) -> Response:
    """One chart as a table."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    known = chain(*run_data.panels_of(store, [item.id for item in runs]))
    chosen = [item for item in known if item.key == panel]
    drawn = run_data.charts(store, runs, chosen)
    if not drawn:
        raise BadAddress(f"panel is {panel[:80]!r}, of which this run has no values")
    return page("values", chart=drawn[0], rows=table(drawn[0]))


@router.get("/runs/{job_id}/rest", response_class=HTMLResponse)
def rest(request: Request, job_id: str, others: With = ()) -> Response:
    """Charts of all that stands in no panel."""
    store = dashboard_of(request).store
    runs = _runs(store, job_id, others)
    _, panels = run_data.panels_of(store, [item.id for item in runs])
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
    for index, (job, name) in enumerate(zip(runs, run_data.names_of(runs), strict=True)):
        left = [item.id for item in runs if item is not job]
        without = f"/runs/{left[0]}?{_query(left[1:])}" if left else ""
        shown.append(
            {"id": job.id, "name": name, "state": job.state, "dashes": DASHES[index % 6], "without": without}
        )
    return shown
