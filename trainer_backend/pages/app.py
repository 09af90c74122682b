"""The dashboard: the router of all pages, and the static files, whose addresses contain a digest."""

import mimetypes
from functools import cache

from fastapi import APIRouter
from starlette.responses import Response

from trainer_backend.pages import episode, jobs, run, runs
from trainer_backend.pages.page import HEADERS, STATIC, version

_FOR_GOOD = "public, max-age=31536000, immutable"


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Read the static files by name. Requests only use this table, so no path leads out of the folder."""
    return {
        path.relative_to(STATIC).as_posix(): (
            path.read_bytes(),
            mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        )
        for path in STATIC.rglob("*")
        if path.is_file()
    }


router = APIRouter(include_in_schema=False)
for part in (runs, run, episode, jobs):
    router.routes.extend(part.router.routes)


@router.get("/static/{digest}/{name:path}")
def static(digest: str, name: str) -> Response:
    """Send a script, a style or a picture, which browsers may cache if the digest is current."""
    if name not in _files():
        return Response(status_code=404, headers=dict(HEADERS))
    body, kind = _files()[name]
    cache_control = _FOR_GOOD if digest == version() else "no-store"
    return Response(body, media_type=kind, headers={**HEADERS, "Cache-Control": cache_control})
