"""Pictures for people: the current state of an environment (GET /env/{env_id}/view), and replays of rollouts.

The page of an environment loads no other files. It fetches itself every second. If the environment has not
changed, the answer is 304, which does not count as use of the session.
"""

import base64
import hashlib
import re
import time
from collections.abc import Iterator, Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Annotated

from fastapi import Path, Query, Request
from starlette.responses import HTMLResponse, Response

from shared_schemas.replay import (
    FRAME_SIDE,
    FrameSide,
    ReplayFrame,
    ReplayReply,
    ReplayRequest,
    ReplaySnapshot,
)
from task_app.errors import InvalidRequest, UnknownId, boundary
from task_app.observing.replaying import Pictured, animated_gif, build_replay, png, replay_in
from task_app.routes.wire import Router
from task_app.services import get_services
from task_app.sessions.sessions import EnvironmentSession, RecentDecision
from task_app.threads import Threads

router = Router(prefix="/env", tags=["env"])

_PAGE = files("task_app.routes").joinpath("view.html").read_text(encoding="utf-8")


def _make_security_policy(page: str) -> str:
    """Return a Content-Security-Policy that allows only the script and the style which the page contains."""
    sources = {}
    for tag in ("script", "style"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.S)
        digest = base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
        sources[tag] = f"'sha256-{digest}'"
    return (
        f"default-src 'none'; img-src data:; connect-src 'self'; script-src {sources['script']}; "
        f"style-src {sources['style']}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


HEADERS = {
    "Content-Security-Policy": _make_security_policy(_PAGE),
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


@router.get(
    "/{env_id}/view",
    response_class=HTMLResponse,
    responses={304: {"description": "The page is as the request's If-None-Match has it"}},
)
async def show_env_page(
    request: Request, env_id: Annotated[str, Path(min_length=1, max_length=200)]
) -> Response:
    """Return a page that shows the environment: picture, text, facts and last decisions.

    The browser asks for a name and a password; the password is the API key.
    """
    services = get_services(request)
    session = services.environments.find(env_id)
    if session is None:
        raise UnknownId("env", env_id, where="env_id", hint="terminated, or idle for too long?")
    if request.headers.get("if-none-match") == (tag := _make_tag(env_id, session)):
        return Response(status_code=304, headers={**HEADERS, "ETag": tag})
    async with request.app.state.pictures, session.lock:
        tag = _make_tag(env_id, session)
        frame = await _draw_frame(services.threads, session, FRAME_SIDE, FRAME_SIDE)
        main = "".join(_write_main(session, frame))
    title = f"{session.environment.name}, world {session.seed}"
    page = Template(_PAGE).substitute(tag=escape(tag), title=escape(title), where=escape(env_id), main=main)
    return HTMLResponse(page.encode("utf-8", "replace"), headers={**HEADERS, "ETag": tag})


def _make_tag(env_id: str, session: EnvironmentSession) -> str:
    """Return the page's ETag, a digest of the session's state; the page changes only with this state."""
    content = (
        f"{env_id}/{session.seed}/{session.turn}/{session.step_idx}/{session.over}/{session.observation.text}"
    )
    return f'"{hashlib.blake2b(content.encode("utf-8", "replace"), digest_size=12).hexdigest()}"'


async def _draw_frame(threads: Threads, session: EnvironmentSession, width: int, height: int) -> bytes | None:
    """Return a PNG of the environment; None if the environment cannot be drawn.

    The caller must hold the session's lock.
    """
    environment = session.environment
    if not isinstance(environment, Pictured):
        return None
    with boundary("environment.frame"):
        return await threads.run("environment.frame", lambda: png(environment.frame(width, height)))


def _write_main(session: EnvironmentSession, frame: bytes | None) -> Iterator[str]:
    observation = session.observation
    over = '<p class="over">The episode has ended.</p>' if session.over else ""
    yield f'{over}<div class="columns"><section>'
    if frame is not None:
        uri = base64.b64encode(frame).decode("ascii")
        yield f'<img alt="the game after decision {session.turn}" src="data:image/png;base64,{uri}">'
    yield f'<ul class="facts">{"".join(_list_facts(session))}</ul></section><section>'
    yield f"<pre>{escape(observation.text)}</pre></section></div>"
    yield f"<h2>Last decisions</h2>{_write_decisions(session)}"


def _list_facts(session: EnvironmentSession) -> Iterator[str]:
    """Yield HTML list items: the session's counts, and the numbers and strings in the observation's data."""
    counts = session.observation.achievements_counts
    yield _write_fact("decisions", session.turn)
    yield _write_fact("env steps", session.step_idx)
    if counts:
        yield _write_fact("achievements", f"{sum(count > 0 for count in counts.values())} of {len(counts)}")
    for name, value in session.observation.data.items():
        if isinstance(value, Mapping):
            numbers = {key: one for key, one in value.items() if type(one) in (int, float) and one}
            yield from (_write_fact(key, one) for key, one in numbers.items())
        elif isinstance(value, bool):
            yield _write_fact(name, "yes" if value else "no")
        elif isinstance(value, int | float | str):
            yield _write_fact(name, value)


def _write_fact(name: str, value: object) -> str:
    return f"<li>{escape(str(name))} <b>{escape(str(value))}</b></li>"


def _write_decisions(session: EnvironmentSession) -> str:
    if not session.recent:
        return '<p class="quiet">None yet.</p>'
    head = "<tr><th>turn</th><th>executed</th><th>reward</th><th>achieved</th></tr>"
    rows = "".join(_write_row(decision) for decision in reversed(session.recent))
    return f"<table><thead>{head}</thead><tbody>{rows}</tbody></table>"


def _write_row(decision: RecentDecision) -> str:
    executed = f"<code>{escape(', '.join(decision.executed))}</code>"
    if decision.invalid_reason is not None:
        executed += f' <span class="refused">{escape(decision.invalid_reason)}</span>'
    marks = "".join(
        f'<span class="{"first" if first else "again"}">{escape(name)}</span>'
        for name, first in decision.achievements()
    )
    reward = sum(decision.env_rewards)
    return (
        f'<tr><td class="number">{decision.turn}</td><td>{executed}</td>'
        f'<td class="number">{reward:g}</td><td>{marks or "&ndash;"}</td></tr>'
    )


frames_router = Router(tags=["frames"])

# Below 18 pixels, a cell of Crafter's map would be one pixel wide, and its items would not be visible.
Side = Annotated[int, Query(ge=18, le=1_024, description="pixels")]
FrameSeconds = Annotated[float, Query(ge=0.02, le=10.0, allow_inf_nan=False)]
EVERY = "X-Frames-Every"

_PICTURE = {"schema": {"type": "string", "format": "binary"}}
_PNG, _GIF = {"image/png": _PICTURE}, {"image/gif": _PICTURE}
# The answer's form for a rollout whose own id ends with "/frames".
_ROLLOUT = {"application/json": {"schema": {"$ref": "#/components/schemas/Rollout"}}}


@frames_router.get("/env/{env_id}/frame", response_class=Response, responses={200: {"content": _PNG}})
async def draw_env(
    request: Request,
    env_id: Annotated[str, Path(min_length=1, max_length=200)],
    width: Side = 288,
    height: Side = 288,
) -> Response:
    """Return a PNG of the environment's current state."""
    services = get_services(request)
    session = services.environments.get(env_id, where="env_id")
    if not isinstance(session.environment, Pictured):
        hint = f"environment {session.environment.name!r} draws none"
        raise UnknownId("picture of", env_id, where="env_id", hint=hint)
    # The lock keeps other requests from stepping the environment while a thread draws it.
    async with request.app.state.pictures, session.lock:
        picture = await _draw_frame(services.threads, session, width, height)
    return Response(picture, media_type="image/png")


@frames_router.get(
    "/rollouts/{rollout_id:path}/frames",
    response_class=Response,
    responses={200: {"content": _GIF | _PNG | _ROLLOUT}},
)
async def draw_rollout(
    request: Request,
    rollout_id: str,
    turn: Annotated[int | None, Query(ge=0, description="0 is the start")] = None,
    side: Annotated[FrameSide, Query()] = FRAME_SIDE,
    frame_s: FrameSeconds = 0.4,
) -> Response:
    """Return a GIF of a finished rollout with one frame per decision, or a PNG of the state after `turn`.

    The rollout is replayed from its seed and its tool calls, and the results are compared with its record. If
    the GIF would have more than `max_frames` frames, it shows every n-th decision and the last one. The
    header `X-Frames-Every` contains n.
    """
    services = get_services(request)
    settings, runner = services.settings, services.runner
    if runner.results.find(f"{rollout_id}/frames") is not None:
        # An id may contain slashes and end with "/frames". This route then gets the request for the rollout.
        return Response(runner.state(f"{rollout_id}/frames"), media_type="application/json")
    record = runner.results.get(rollout_id)

    # Replays run one at a time, because they take the processor from all episodes.
    async with request.app.state.replays:
        replay = build_replay(record, services.boards)
        every = replay.every(settings.max_frames) if turn is None else 1
        turns = replay.turns(every) if turn is None else replay.only(turn)

        def draw() -> bytes:
            moments = replay.moments(turns, until_s=time.monotonic() + settings.max_replay_s)
            pictures = [replay.picture(side) for _ in moments]
            return animated_gif(pictures, frame_s=frame_s) if turn is None else png(pictures[0])

        drawn = await services.threads.run("replay", draw)
    kind = "image/gif" if turn is None else "image/png"
    return Response(drawn, media_type=kind, headers={EVERY: str(every)})


@frames_router.post("/replay")
async def replay_episode(request: Request, body: ReplayRequest) -> ReplayReply:
    """Replay the episode that the body records; return PNGs and snapshots after the requested turns.

    The episode is replayed from its start and its tool calls. One request gets at most `max_frames` pictures.
    Errors: 409 `replay_departs`, if the replay differs from the record; 404 `no_pictures`, if the environment
    cannot be drawn; 422 `not_restorable`, if it has no snapshots.
    """
    services = get_services(request)
    settings, drawn, kept = services.settings, {*body.frames}, {*body.snapshots}
    if len(drawn) > settings.max_frames:
        raise InvalidRequest(
            f"{len(drawn)} frames are asked for; at most {settings.max_frames} in one request", where="frames"
        )
    async with request.app.state.replays:
        replay = replay_in(body, services.boards, at_most_bytes=settings.max_snapshot_bytes)

        def play() -> ReplayReply:
            frames, snapshots = [], []
            for moment in replay.moments(drawn | kept, until_s=time.monotonic() + settings.max_replay_s):
                if moment.turn in drawn:
                    picture = base64.b64encode(png(replay.picture(body.side))).decode("ascii")
                    frames.append(ReplayFrame(turn=moment.turn, png=picture))
                if moment.turn in kept:
                    text = replay.snapshot(moment, at_most_bytes=settings.max_snapshot_bytes)
                    snapshots.append(ReplaySnapshot(turn=moment.turn, snapshot=text))
            return ReplayReply(frames=tuple(frames), snapshots=tuple(snapshots))

        return await services.threads.run("replay", play)
