"""Pages of rollouts: the list, one episode decision by decision, and its pictures."""

from collections.abc import Mapping
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from trainer_backend.dashboard.errors import UnknownTurn
from trainer_backend.dashboard.rendering import HEADERS, page
from trainer_backend.dashboard.rollout_data import Episode, anchor_lines, episode_of, segment_of
from trainer_backend.dashboard.rollouts_view import (
    asked_of,
    caption,
    facet_lists,
    rollout_line,
)
from trainer_backend.dashboard.routing import frame, page_router
from trainer_backend.dashboard.run_pages import run_frame
from trainer_backend.dashboard.services import dashboard_of
from trainer_backend.errors import TrainerError
from trainer_backend.store import reads_rollouts

router = page_router()

_PAGE = 50


@router.get("/runs/{job_id}/rollouts", response_class=HTMLResponse)
def rollouts(request: Request, job_id: str) -> Response:
    """Stored rollouts, as the address filters and sorts them."""
    store = dashboard_of(request).store
    asked = asked_of(request.query_params)
    found = reads_rollouts.rollouts(
        store, job_id, asked.where, sort=asked.sort, descending=asked.down, cursor=asked.cursor, limit=_PAGE
    )
    here = f"/runs/{job_id}/rollouts?"

    def sorted_by(key: str) -> str:
        """The same column again turns the order around."""
        return here + asked.query(sort=key, down=int(not (asked.sort == key and asked.down)), cursor=None)

    return page(
        "rollouts",
        rows=[rollout_line(job_id, row) for row in found.items],
        caption=caption(found.items, reads_rollouts.count_rollouts(store, job_id, asked.where), asked),
        facets=facet_lists(reads_rollouts.facets(store, job_id)),
        chosen=asked.where,
        filtered=asked.filtered,
        sort=asked.sort,
        down=asked.down,
        sorted_by=sorted_by,
        later=here + asked.query(cursor=found.cursor) if found.cursor else "",
        first=here + asked.query(cursor=None),
        paged=asked.cursor is not None,
        **run_frame(request, job_id, "rollouts"),
    )


@router.get("/runs/{job_id}/frames", response_class=HTMLResponse)
async def frames(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """The pictures before and after a decision, or a sentence that says why there are none."""
    try:
        drawn = await _drawn(request, job_id, rollout)
    except TrainerError as error:  # the rest of the page stands without them
        return page("frames", frame_png="", turn=turn, missing=str(error))
    if turn not in drawn or turn - 1 not in drawn:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    return page("frames", frame_png=_frame_address(job_id, rollout), turn=turn, missing="")


@router.get("/runs/{job_id}/frame.png")
async def frame_png(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """What the game showed after a decision; of turn 0, at the start."""
    drawn = await _drawn(request, job_id, rollout)
    if turn not in drawn:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    # An episode never changes; private, for a shared cache knows nothing of keys.
    keep = {**HEADERS, "Cache-Control": "private, max-age=86400"}
    return Response(drawn[turn], media_type="image/png", headers=keep)


@router.get("/runs/{job_id}/rollouts/{rollout_id:path}", response_class=HTMLResponse)
def rollout(request: Request, job_id: str, rollout_id: str, turn: int = 1) -> Response:
    """One episode, at one of its decisions."""
    dashboard = dashboard_of(request)
    episode = episode_of(dashboard, job_id, rollout_id)
    values = {**episode.values(), "run": episode.job, **frame(request, "runs")}
    if episode.trajectory is None or not episode.trajectory.steps:
        return page("rollout", lines=(), **values)
    decision = episode.decision(turn)
    pictures = dashboard.frames.known(episode.run_dir, episode.stored.rollout)
    count = len(episode.trajectory.steps)
    return page(
        "rollout",
        lines=episode.lines(),
        decision=decision,
        address=f"/runs/{job_id}/rollouts/{quote(episode.row.rollout_id, safe='/')}?",
        pager=(
            ("prev", turn - 1, "← Previous"),
            ("next", turn + 1 if turn < count else 0, "Next →"),
        ),
        turn=turn,
        frames=f"/runs/{job_id}/frames?" + urlencode({"rollout": episode.row.rollout_id, "turn": turn}),
        frame_png=_frame_address(job_id, episode.row.rollout_id),
        missing=pictures if isinstance(pictures, str) else "",
        drawn=pictures is not None,
        anchors=anchor_lines(dashboard, episode, decision),
        colour="advantage" if decision.credit else "logprob",
        **segment_of(dashboard, episode, turn),
        **values,
    )


def _frame_address(job_id: str, rollout_id: str) -> str:
    """Of a picture, but for its turn."""
    return f"/runs/{job_id}/frame.png?" + urlencode({"rollout": rollout_id})


async def _drawn(request: Request, job_id: str, rollout: str) -> Mapping[int, bytes]:
    dashboard = dashboard_of(request)
    episode: Episode = await run_in_threadpool(episode_of, dashboard, job_id, rollout)
    return await dashboard.frames.of(episode.run_dir, episode.stored.rollout)
