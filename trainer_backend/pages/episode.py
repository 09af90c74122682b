"""The page of an episode: one rollout, decision by decision, with its pictures and its tokens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, Response

from shared_schemas.trajectory import Trajectory
from trainer_backend.core.emission_views import assistant_turn_boundaries
from trainer_backend.core.segments import build_segments
from trainer_backend.errors import RunDirectoryError, SegmentError, TrainerError
from trainer_backend.pages.episode_view import decision_lines, decision_view
from trainer_backend.pages.figures import number, rollout_address, short_id, signed, spaced
from trainer_backend.pages.page import (
    HEADERS,
    Dashboard,
    UnknownTurn,
    frame,
    get_dashboard,
    page,
    page_router,
)
from trainer_backend.pages.stored import StoredRollout, read_stored, why_undrawn
from trainer_backend.pages.token_view import find_decoder, segment_view, token_advantages
from trainer_backend.store import jobs, reads_rollouts
from trainer_backend.store.database import Store
from trainer_backend.store.rows import Job, RolloutRow

_ANCHORS_SHOWN = 40


def read_episode(store: Store, job_id: str, rollout_id: str) -> tuple[Job, RolloutRow, Path, StoredRollout]:
    """Return a rollout's job, the rollout's row in the store, the run directory, and the rollout itself."""
    job = jobs.get(store, job_id)
    row = reads_rollouts.rollout(store, job_id, rollout_id)
    if job.run_dir is None:
        raise RunDirectoryError(f"job {job_id} has no run directory yet")
    run_dir = Path(job.run_dir)
    return job, row, run_dir, read_stored(run_dir / row.file, row.rollout_id)


def show_episode(dashboard: Dashboard, job_id: str, rollout_id: str, turn: int) -> dict[str, Any]:
    """Return the template values for the page of an episode, opened at the decision `turn`.

    If the episode has no decisions, only the values about the whole episode are returned.

    Raises:
        UnknownTurn: the episode has decisions, but none with the number `turn`.
    """
    store = dashboard.store
    job, row, run_dir, (rollout, columns) = read_episode(store, job_id, rollout_id)
    episode, failure = rollout.trajectory, rollout.failure
    learned = reads_rollouts.learning_iteration(store, job_id, row.rollout_id)
    values = {
        "run": {"id": job.id, "name": job.name}, "row": row, "short": short_id(row.rollout_id),
        "failed": "" if row.status == "finished" else row.status,
        "failure": f"{failure.code}: {failure.detail}" if failure is not None else "",
        "about": _describe(row, episode, learned), "notes": () if episode is None else episode.warnings,
        "siblings": reads_rollouts.siblings(store, job_id, row), "lines": [],
    }  # fmt: skip
    if episode is None or not episode.steps:
        return values
    count = len(episode.steps)
    if not 1 <= turn <= count:
        raise UnknownTurn(f"rollout {row.rollout_id} has decisions 1 to {count}, not {turn}")
    decision = decision_view(episode, columns, turn)
    pictures, key = dashboard.frames.cached(run_dir, rollout), decision["state_key"]
    # Decisions of the group that were made in the same state, including this one.
    anchors = reads_rollouts.anchors(store, job_id, row, key, limit=_ANCHORS_SHOWN) if key else ()
    branches = reads_rollouts.branches(store, job_id, row, turn)
    return values | {
        "branches": branches,
        "lines": decision_lines(episode, columns), "decision": decision, "turn": turn, "anchors": anchors,
        "address": f"{rollout_address(job_id, row.rollout_id)}?",
        "pager": (
            ("prev", turn - 1, "← Previous"),
            ("next", turn + 1 if turn < count else 0, "Next →"),
        ),
        "frames": f"/runs/{job_id}/frames?" + urlencode({"rollout": row.rollout_id, "turn": turn}),
        "frame_png": _frame_address(job_id, row.rollout_id), "no_pictures": why_undrawn(rollout),
        "missing": pictures if isinstance(pictures, str) else "", "drawn": pictures is not None,
        "colour": "advantage" if decision["credit"] else "logprob",
        **_find_segment(episode, columns, run_dir, row.rollout_id, turn),
    }  # fmt: skip


def _describe(row: RolloutRow, episode: Trajectory | None, learned: int | None) -> list[tuple[str, str]]:
    facts = [
        ("stage", f"{row.stage} {row.iteration}" if row.iteration else row.stage),
        ("policy", row.policy),
        ("world", "" if row.seed is None else str(row.seed)),
        ("outcome", "" if episode is None else number(row.outcome_reward)),
        ("sum of r_t", "" if row.reward is None else signed(row.reward)),
        ("unique achievements", "" if not row.unique_achievements else str(row.unique_achievements)),
        ("decisions", str(row.decisions)),
        ("env steps", "" if row.env_steps is None else str(row.env_steps)),
        ("ended by", spaced(row.stop_reason or "")),
        ("learned from by", "" if learned is None else f"iteration {learned}"),
    ]
    if episode is not None and episode.parent_rollout_id is not None:
        parent = short_id(episode.parent_rollout_id)
        facts.append(("began at", f"a snapshot of {parent}, after {episode.parent_turn} of its decisions"))
    if episode is not None and (reward := episode.user_reward) is not None:
        environment = number(reward.environment_outcome_reward)
        facts.append(("judged by", f"{reward.reward_function}; by its environment {environment}"))
    return [(name, value) for name, value in facts if value]


def _find_segment(
    episode: Trajectory, columns: list[dict[str, Any]], run_dir: Path, rollout_id: str, turn: int
) -> dict[str, Any]:
    """Return template values about the segment with a decision's trained tokens, or why there is none."""
    try:
        segments = build_segments(episode.steps, rollout_id=rollout_id)
    except SegmentError as error:
        return {"segment": None, "segments": 0, "no_tokens": f"Not to be trained on: {error}"}
    for index, segment in enumerate(segments):
        if any(t + 1 == turn for t, _, _ in assistant_turn_boundaries(segment)):
            decode, advantages = find_decoder(run_dir), token_advantages(columns)
            view = segment_view(segment, index, turn=turn, decode=decode, advantages=advantages)
            return {"segment": view, "segments": len(segments), "no_tokens": ""}
    return {"segment": None, "segments": len(segments), "no_tokens": "This decision sampled no token."}


router = page_router()


@router.get("/runs/{job_id}/rollouts/{rollout_id:path}", response_class=HTMLResponse)
def rollout(request: Request, job_id: str, rollout_id: str, turn: int = 1) -> Response:
    """Show an episode at one of its decisions."""
    values = show_episode(get_dashboard(request), job_id, rollout_id, turn)
    return page("rollout", **values, **frame(request, "runs"))


@router.get("/runs/{job_id}/frames", response_class=HTMLResponse)
async def frames(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """Show the pictures before and after a decision, or the reason why there are none."""
    try:
        pngs = await _read_frames(request, job_id, rollout)
    except TrainerError as error:  # the rest of the page is shown without pictures
        return page("frames", frame_png="", turn=turn, missing=str(error))
    if turn not in pngs or turn - 1 not in pngs:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    return page("frames", frame_png=_frame_address(job_id, rollout), turn=turn, missing="")


@router.get("/runs/{job_id}/frame.png")
async def frame_png(request: Request, job_id: str, rollout: str, turn: int) -> Response:
    """Send the picture of the state after the decision `turn`; 0 is the start of the episode."""
    pngs = await _read_frames(request, job_id, rollout)
    if turn not in pngs:
        raise UnknownTurn(f"rollout {rollout[:200]} has no decision {turn}")
    # Episodes never change. Only the browser may cache the picture, since shared caches check no keys.
    headers = {**HEADERS, "Cache-Control": "private, max-age=86400"}
    return Response(pngs[turn], media_type="image/png", headers=headers)


def _frame_address(job_id: str, rollout_id: str) -> str:
    """Return the address of an episode's pictures, to which a template appends `&turn=` and a number."""
    return f"/runs/{job_id}/frame.png?" + urlencode({"rollout": rollout_id})


async def _read_frames(request: Request, job_id: str, rollout_id: str) -> Mapping[int, bytes]:
    dashboard = get_dashboard(request)
    _, _, run_dir, (rollout, _) = await run_in_threadpool(read_episode, dashboard.store, job_id, rollout_id)
    return await dashboard.frames.of(run_dir, rollout)
