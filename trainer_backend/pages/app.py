"""The router of the dashboard: all pages, and the static files, whose addresses contain a digest."""

import mimetypes
from functools import cache

from fastapi import APIRouter
from starlette.responses import Response

from trainer_backend.pages import episode, jobs, run, runs
from trainer_backend.pages.page import HEADERS, STATIC, version

_FOR_GOOD = "public, max-age=31536000, immutable"


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the content and the MIME type of each static file by its path in the folder `STATIC`.

    Requests are looked up in this table, so a path such as `../secret` cannot leave the folder.
    """
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
    """Send a script, a style or a picture. Browsers may cache it only if the digest is the current one."""
    if name not in _files():
        return Response(status_code=404, headers=dict(HEADERS))
    body, kind = _files()[name]
    cache_control = _FOR_GOOD if digest == version() else "no-store"
    return Response(body, media_type=kind, headers={**HEADERS, "Cache-Control": cache_control})
