"""The dashboard: one router of all pages, and static files, each served under the digest in its address."""

import mimetypes
from functools import cache

from fastapi import APIRouter
from starlette.responses import Response

from trainer_backend.pages import jobs, rollouts, run, runs
from trainer_backend.pages.page import HEADERS, STATIC, version

_FOR_GOOD = "public, max-age=31536000, immutable"


def static_file(asked: str, name: str) -> Response:
    """404 for an unknown file; a file under an old digest is sent, and browsers do not keep it."""
    found = _files().get(name)
    if found is None:
        return Response(status_code=404, headers=dict(HEADERS))
    body, kind = found
    keep = _FOR_GOOD if asked == version() else "no-store"
    return Response(body, media_type=kind, headers={**HEADERS, "Cache-Control": keep})


@cache
def _files() -> dict[str, tuple[bytes, str]]:
    """Return the static files by name; only names in this table can be requested, so no path leads out."""
    return {
        path.relative_to(STATIC).as_posix(): (
            path.read_bytes(),
            mimetypes.guess_type(path.name)[0] or "application/octet-stream",
        )
        for path in STATIC.rglob("*")
        if path.is_file()
    }


router = APIRouter(include_in_schema=False)
for part in (runs, run, rollouts, jobs):
    router.include_router(part.router)


@router.get("/static/{version}/{name:path}")
def static(version: str, name: str) -> Response:
    """A script, a style or a picture of the dashboard; the version in its address makes it keep for good."""
    return static_file(version, name)
