"""The dashboard: every page of it, as one router that the trainer's application takes in."""

from fastapi import APIRouter
from starlette.responses import Response

from trainer_backend.dashboard import job_pages, list_pages, rollout_pages, run_pages
from trainer_backend.dashboard.static_files import static_file

router = APIRouter(include_in_schema=False)
for part in (list_pages, run_pages, rollout_pages, job_pages):
    router.include_router(part.router)


@router.get("/static/{version}/{name:path}")
def static(version: str, name: str) -> Response:
    """A script, a style or a picture of the dashboard; the version in its address makes it keep for good."""
    return static_file(version, name)
