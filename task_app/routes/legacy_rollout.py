"""POST /rollout: one call, the whole trajectory back, by the contract that users of task apps know."""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from task_app.dialects.one_call.request import LegacyRollout
from task_app.dialects.one_call.rollout import legacy_rollout
from task_app.routes.wire import ReplyJSON
from task_app.services import services_of

router = APIRouter(tags=["rollouts"])


@router.post("/rollout")
async def rollout(request: Request, body: LegacyRollout) -> Response:
    """Run one rollout and answer with it. A client that goes away cancels it, unless it sent an
    Idempotency-Key: then it may come back for the answer."""
    playing = asyncio.ensure_future(legacy_rollout(services_of(request), body))
    watching: asyncio.Future[Any] = asyncio.ensure_future(_gone(request))
    try:
        await asyncio.wait({playing, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not playing.done() and "idempotency-key" not in request.headers:
            playing.cancel()
            await asyncio.wait({playing})
            return Response(status_code=499)  # nobody reads it
        return ReplyJSON(await playing)
    finally:
        playing.cancel()
        watching.cancel()


async def _gone(request: Request) -> None:
    """Returns when the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
