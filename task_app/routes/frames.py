"""GET /env/{env_id}/frame: the game as a picture, for people. Environments without pictures answer 404."""

import asyncio
import io
from typing import Annotated, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Path, Query, Request
from PIL import Image
from starlette.responses import Response

from task_app.errors import UnknownId, boundary
from task_app.services import services_of

router = APIRouter(prefix="/env", tags=["env"])

Side = Annotated[int, Query(ge=16, le=1_024, description="pixels")]


@runtime_checkable
class Pictured(Protocol):
    """An `Environment` that can be drawn. Drawing changes nothing, and may take milliseconds."""

    def frame(self, width: int, height: int) -> npt.NDArray[np.uint8]:
        """[height, width, 3] RGB picture of the episode as it is now."""


@router.get("/{env_id}/frame")
async def frame(
    request: Request,
    env_id: Annotated[str, Path(min_length=1, max_length=200)],
    width: Side = 288,
    height: Side = 288,
) -> Response:
    """A PNG of the environment as it is now."""
    session = services_of(request).environments.get(env_id, where="env_id")
    environment = session.environment
    if not isinstance(environment, Pictured):
        hint = f"environment {environment.name!r} draws none"
        raise UnknownId("picture of", env_id, where="env_id", hint=hint)
    # The lock: nothing may step the world while a thread draws it.
    async with session.lock:
        with boundary("environment.frame"):
            png = await asyncio.to_thread(_png, environment, width, height)
    return Response(png, media_type="image/png")


def _png(environment: Pictured, width: int, height: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(environment.frame(width, height)).save(file, "PNG", optimize=True)
    return file.getvalue()
