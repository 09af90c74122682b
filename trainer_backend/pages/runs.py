"""Pages of several runs: the list, and the comparison of chosen ones."""

from dataclasses import dataclass

from fastapi import Query, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from trainer_backend.collect.losses import FAILED, FINISHED, sum_losses
from trainer_backend.pages.facts import folder_of, time_taken
from trainer_backend.pages.figures import clip, number
from trainer_backend.pages.page import BadAddress, dashboard_of, frame, page, page_router
from trainer_backend.pages.run_view import bounds_of
from trainer_backend.pages.series import Spark, spark_of
from trainer_backend.store import jobs, reads
from trainer_backend.store.rows import (
    ACTIVE,
    ENDED,
    JobRow,
    JobState,
    RunSummary,
    Series,
    iterations_of,
    tables_of,
)

# Numbers of the last rows that the list shows.
SPARK = "episode/outcome_reward"
LATEST = (SPARK, "eval/outcome_reward", "eval/outcome_reward_low", "eval/outcome_reward_high")
_TEXT = 400  # characters of a detail; the run's own page has all of it


@dataclass(frozen=True, slots=True)
class RunLine:
    """A line of the list of runs."""

    job: JobRow
    where: str
    tags: tuple[str, ...]
    live: bool
    detail: str
    done: int
    total: int
    outcome: str
    spark: Spark
    held_out: str
    bounds: str
    advantage: str
    took: str
    lost: str


def run_line(summary: RunSummary, spark: Series | None) -> RunLine:
    job, held_out, losses = summary.job, summary.evaluated, sum_losses(summary.sums)
    tables = tables_of(job.config)
    return RunLine(
        job=job,
        where=f"{folder_of(job)}{'' if job.origin == 'api' else ' · turnwise train'}",
        tags=tuple(f"{name}={value}" for name, value in job.tags.items()),
        live=job.state in ACTIVE,
        detail=clip(job.detail or "", _TEXT),
        done=summary.iteration,
        total=iterations_of(job.config) or 0,
        outcome=number(summary.latest.get(SPARK)),
        spark=spark_of(spark, "training outcome"),
        held_out=number(held_out.get("eval/outcome_reward")),
        bounds=bounds_of(held_out),
        advantage=str(tables.get("algorithm", {}).get("advantage", "")),
        took=time_taken(job),
        lost=losses.count if losses.lost else "",
    )


router = page_router()

_GROUPS: dict[str, tuple[str, frozenset[JobState]]] = {
    "": ("All", frozenset()),
    "active": ("Under way", ACTIVE | {"queued", "paused"}),
    "ended": ("Ended", ENDED),
}
_SPARK_POINTS = 60
_MOST_RUNS = 6  # the page has as many colours


@router.get("/", response_class=HTMLResponse)
def runs(request: Request, state: str = "", cursor: str | None = None) -> Response:
    """Show the list of runs, the newest first."""
    dashboard = dashboard_of(request)
    if state not in _GROUPS:
        raise BadAddress(f"state is {state[:40]!r}; known: {', '.join(filter(None, _GROUPS))}")
    rows = jobs.find(dashboard.store, states=_GROUPS[state][1], cursor=cursor)
    summaries = reads.summaries(dashboard.store, rows.items, LATEST, sums=(*FAILED, *FINISHED))
    ids = [job.id for job in rows.items]
    sparks = reads.series(dashboard.store, ids, [SPARK], points=_SPARK_POINTS) if ids else {}
    return page(
        "runs",
        lines=[run_line(summary, sparks[summary.job.id].get(SPARK)) for summary in summaries],
        groups=[(key, name) for key, (name, _) in _GROUPS.items()],
        group=state,
        address=f"/?state={state}" + (f"&cursor={cursor}" if cursor else ""),
        cursor=rows.cursor,
        now=dashboard.clock(),
        **frame(request, "runs"),
    )


@router.get("/compare")
def compare(run: list[str] = Query(default=[])) -> Response:  # noqa: B008 (FastAPI's way)
    """Redirect from the list's check boxes to the page of the chosen runs."""
    if not run:
        raise BadAddress("no run is chosen; tick two or more in the list")
    first, *others = run
    if len(run) > _MOST_RUNS:
        raise BadAddress(f"{len(run)} runs are chosen; at most {_MOST_RUNS} can be told apart")
    return RedirectResponse(
        f"/runs/{first}?" + "&".join(f"with={other}" for other in others), status_code=303
    )
