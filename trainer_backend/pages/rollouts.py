"""Pages of rollouts: the list with its filters, one episode decision by decision, and its pictures."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, get_args
from urllib.parse import quote, urlencode

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from trainer_backend.errors import TrainerError
from trainer_backend.pages.episode import Episode, episode_of, segment_of
from trainer_backend.pages.figures import spaced
from trainer_backend.pages.page import (
    HEADERS,
    BadAddress,
    UnknownTurn,
    dashboard_of,
    frame,
    page,
    page_router,
)
from trainer_backend.pages.run import run_frame
from trainer_backend.store import reads_rollouts
from trainer_backend.store.reads_rollouts import RolloutFilter, RolloutSort
from trainer_backend.store.rows import RolloutRow

_SORTS: dict[str, RolloutSort] = {name: name for name in get_args(RolloutSort)}
_NUMBERS = {"iteration": int, "min_reward": float}
_FILTERS = tuple(field.name for field in fields(RolloutFilter))
# A database refuses to compare with a larger whole number.
_LARGEST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RolloutQuery:
    """The filters and the order of the list of rollouts, and where a page of it begins."""

    where: RolloutFilter
    sort: RolloutSort = "newest"
    down: bool = True
    cursor: str | None = None

    @property
    def filtered(self) -> bool:
        return self.where != RolloutFilter()

    def query(self, **changes: Any) -> str:
        """The query string of an address with these filters and this order."""
        values = {name: getattr(self.where, name) for name in _FILTERS}
        values |= {"sort": self.sort, "down": int(self.down), "cursor": self.cursor} | changes
        return urlencode({name: value for name, value in values.items() if value is not None})


def query_of(params: Mapping[str, str]) -> RolloutQuery:
    """Read the filters and the order from an address; a form also sends its empty fields."""
    texts = {name: params[name].strip() for name in _FILTERS if params.get(name, "").strip()}
    where = RolloutFilter(**{name: _value(name, text) for name, text in texts.items()})
    name = params.get("sort") or "newest"
    sort = _SORTS.get(name)
    if sort is None:
        raise BadAddress(f"sort is {name[:40]!r}; known: {', '.join(_SORTS)}")
    return RolloutQuery(where, sort, params.get("down", "1") != "0", params.get("cursor") or None)


def caption(rows: Sequence[RolloutRow], total: int, query: RolloutQuery) -> str:
    """The caption of the table: the number of rollouts and their order."""
    if query.sort == "newest" and query.down:
        order = "newest first"
    else:
        order = f"by {spaced(query.sort)}, {'highest' if query.down else 'lowest'} first"
    return f"{len(rows)} of {total:,} rollouts, {order}"


def _value(name: str, text: str) -> Any:
    kind = _NUMBERS.get(name)
    if kind is None:
        return text
    try:
        value = kind(text)
    except ValueError:
        value = math.inf
    if not abs(value) <= _LARGEST:  # also NaN
        what = "a whole number" if kind is int else "a number"
        raise BadAddress(f"{name} is {text[:40]!r}; it must be {what} of at most {_LARGEST}")
    return value


router = page_router()

_PAGE = 50
_ANCHORS_SHOWN = 40


@router.get("/runs/{job_id}/rollouts", response_class=HTMLResponse)
def rollouts(request: Request, job_id: str) -> Response:
    """Show the list of rollouts, as the address filters and sorts it."""
    store = dashboard_of(request).store
    query = query_of(request.query_params)
    rows = reads_rollouts.rollouts(
        store, job_id, query.where, sort=query.sort, descending=query.down, cursor=query.cursor, limit=_PAGE
    )
    here = f"/runs/{job_id}/rollouts?"

    def sorted_by(key: str) -> str:
        """The address that sorts by a column; for the present column it reverses the order."""
        return here + query.query(sort=key, down=int(not (query.sort == key and query.down)), cursor=None)

    return page(
        "rollouts",
        rows=rows.items,
        caption=caption(rows.items, reads_rollouts.count_rollouts(store, job_id, query.where), query),
        facets=reads_rollouts.facets(store, job_id),
        chosen=query.where,
        filtered=query.filtered,
        sort=query.sort,
        down=query.down,
        sorted_by=sorted_by,
        later=here + query.query(cursor=rows.cursor) if rows.cursor else "",
        first=here + query.query(cursor=None),
        paged=query.cursor is not None,
        **run_frame(request, job_id, "rollouts"),
    )


@router.get("/runs/{job_id}/frames", response_class=HTMLResponse)
async def frames(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """Show the pictures before and after a decision, or the reason why there are none."""
    try:
        pngs = await _frames_of(request, job_id, rollout)
    except TrainerError as error:  # the rest of the page stands without them
        return page("frames", frame_png="", turn=turn, missing=str(error))
    if turn not in pngs or turn - 1 not in pngs:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    return page("frames", frame_png=_frame_address(job_id, rollout), turn=turn, missing="")


@router.get("/runs/{job_id}/frame.png")
async def frame_png(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """Send the picture after a decision; turn 0 is the start."""
    pngs = await _frames_of(request, job_id, rollout)
    if turn not in pngs:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    # An episode never changes. A shared cache does not check keys, so only the browser may cache it.
    headers = {**HEADERS, "Cache-Control": "private, max-age=86400"}
    return Response(pngs[turn], media_type="image/png", headers=headers)


@router.get("/runs/{job_id}/rollouts/{rollout_id:path}", response_class=HTMLResponse)
def rollout(request: Request, job_id: str, rollout_id: str, turn: int = 1) -> Response:
    """Show an episode at one of its decisions."""
    dashboard = dashboard_of(request)
    episode = episode_of(dashboard, job_id, rollout_id)
    values = {**episode.values(), "run": episode.job, **frame(request, "runs")}
    if episode.trajectory is None or not episode.trajectory.steps:
        return page("rollout", lines=(), **values)
    decision = episode.decision(turn)
    pictures = dashboard.frames.cached(episode.run_dir, episode.stored.rollout)
    count = len(episode.trajectory.steps)
    # Decisions of the group in the same state, this one among them.
    key, most = decision.state_key, _ANCHORS_SHOWN
    anchors = reads_rollouts.anchors(dashboard.store, job_id, episode.row, key, limit=most) if key else ()
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
        anchors=anchors,
        colour="advantage" if decision.credit else "logprob",
        **segment_of(dashboard, episode, turn),
        **values,
    )


def _frame_address(job_id: str, rollout_id: str) -> str:
    """The address of a picture without its turn."""
    return f"/runs/{job_id}/frame.png?" + urlencode({"rollout": rollout_id})


async def _frames_of(request: Request, job_id: str, rollout: str) -> Mapping[int, bytes]:
    dashboard = dashboard_of(request)
    episode: Episode = await run_in_threadpool(episode_of, dashboard, job_id, rollout)
    return await dashboard.frames.of(episode.run_dir, episode.stored.rollout)
