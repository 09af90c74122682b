"""Pictures for people: of an environment now, and of a finished rollout by playing it again."""

import time
from typing import Annotated

from fastapi import APIRouter, Path, Query, Request
from starlette.responses import Response

from task_app.errors import UnknownId, boundary
from task_app.observing.pictures import Pictured, animated_gif, png
from task_app.observing.replaying import replay_of
from task_app.services import services_of

router = APIRouter(tags=["frames"])

# Below 18 a cell of Crafter is one pixel, and its items would have none.
Side = Annotated[int, Query(ge=18, le=1_024, description="pixels")]
# All frames of an episode are in memory at once.
GifSide = Annotated[int, Query(ge=18, le=288, description="pixels")]
FrameSeconds = Annotated[float, Query(ge=0.02, le=10.0, allow_inf_nan=False)]
EVERY = "X-Frames-Every"


@router.get("/env/{env_id}/frame")
async def frame(
    request: Request,
    env_id: Annotated[str, Path(min_length=1, max_length=200)],
    width: Side = 288,
    height: Side = 288,
) -> Response:
    """A PNG of the environment as it is now."""
    services = services_of(request)
    session = services.environments.get(env_id, where="env_id")
    environment = session.environment
    if not isinstance(environment, Pictured):
        hint = f"environment {environment.name!r} draws none"
        raise UnknownId("picture of", env_id, where="env_id", hint=hint)
    # The lock: nothing may step the world while a thread draws it. Only who draws holds it.
    async with request.app.state.pictures, session.lock:
        with boundary("environment.frame"):
            picture = await services.threads.run(
                "environment.frame", lambda: png(environment.frame(width, height))
            )
    return Response(picture, media_type="image/png")


@router.get("/rollouts/{rollout_id:path}/frames")
async def frames(
    request: Request,
    rollout_id: str,
    turn: Annotated[int | None, Query(ge=0, description="0 is the start")] = None,
    side: GifSide = 144,
    frame_s: FrameSeconds = 0.4,
) -> Response:
    """An animated GIF of a finished rollout, a frame a decision; with `turn`, the PNG after that decision.

    It is played again from its seed and calls, and held against its record. Episodes longer than `max_frames`
    show every n-th decision and the last; the header `X-Frames-Every` is n.
    """
    services = services_of(request)
    settings, runner = services.settings, services.runner
    if runner.results.find(f"{rollout_id}/frames") is not None:
        # An id may hold slashes, and end like this route: then its own route would never reach it.
        return Response(runner.state(f"{rollout_id}/frames"), media_type="application/json")
    record = runner.results.get(rollout_id)

    # One at a time: a replay is for people, and takes the processor from everybody who plays.
    async with request.app.state.replays:
        replay = replay_of(record, services.boards)
        every = replay.every(settings.max_frames) if turn is None else 1
        turns = replay.turns(every) if turn is None else replay.only(turn)

        def draw() -> bytes:
            pictures = replay.pictures(turns, side, until_s=time.monotonic() + settings.max_replay_s)
            return animated_gif(pictures, frame_s=frame_s) if turn is None else png(pictures[0])

        drawn = await services.threads.run("replay", draw)
    kind = "image/gif" if turn is None else "image/png"
    return Response(drawn, media_type=kind, headers={EVERY: str(every)})
