"""Pages of several runs: the list, and the choice of those that are laid over one another."""

from fastapi import Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainer_backend.dashboard.errors import BadAddress
from trainer_backend.dashboard.rendering import page
from trainer_backend.dashboard.routing import frame, page_router
from trainer_backend.dashboard.runs_view import LATEST, SPARK, run_line
from trainer_backend.dashboard.services import dashboard_of
from trainer_backend.store import jobs, reads
from trainer_backend.store.rows import ACTIVE, ENDED, JobState

router = page_router()

_GROUPS = (("", "All"), ("active", "Under way"), ("ended", "Ended"))
_STATES: dict[str, frozenset[JobState]] = {
    "": frozenset(),
    "active": ACTIVE | {"queued", "paused"},
    "ended": ENDED,
}
_SPARK_POINTS = 60
_MOST_RUNS = 6  # as many colours as can be told apart


@router.get("/", response_class=HTMLResponse)
def runs(request: Request, state: str = "", cursor: str | None = None) -> Response:
    """Every run, newest first."""
    dashboard = dashboard_of(request)
    if state not in _STATES:
        raise BadAddress(f"state is {state[:40]!r}; known: {', '.join(filter(None, _STATES))}")
    found = jobs.find(dashboard.store, states=_STATES[state], cursor=cursor)
    summaries = reads.summaries(dashboard.store, found.items, LATEST)
    ids = [job.id for job in found.items]
    sparks = reads.series(dashboard.store, ids, [SPARK], points=_SPARK_POINTS) if ids else {}
    return page(
        "runs",
        lines=[run_line(summary, sparks[summary.job.id].get(SPARK)) for summary in summaries],
        groups=_GROUPS,
        group=state,
        address=f"/?state={state}" + (f"&cursor={cursor}" if cursor else ""),
        cursor=found.cursor,
        now=dashboard.clock(),
        **frame(request, "runs"),
    )


@router.get("/compare")
def compare(run: list[str] = Query(default=[])) -> Response:  # noqa: B008 (FastAPI's way)
    """From the boxes of the list to the page that lays runs over one another."""
    if not run:
        raise BadAddress("no run is chosen; tick two or more in the list")
    first, *others = run
    if len(run) > _MOST_RUNS:
        raise BadAddress(f"{len(run)} runs are chosen; at most {_MOST_RUNS} can be told apart")
    return RedirectResponse(
        f"/runs/{first}?" + "&".join(f"with={other}" for other in others), status_code=303
    )
