"""GET /metrics, for Prometheus."""

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from trainer_backend.api.exposition import page
from trainer_backend.api.service import service_of

router = APIRouter(tags=["service"])


@router.get("/metrics", response_class=PlainTextResponse)
async def metrics(request: Request) -> Response:
    """Counts of the service, and the last figures of the jobs that run, in the text format of Prometheus."""
    service = service_of(request)
    accept = request.headers.get("accept", "")
    return await service.ask(page, service, version=request.app.version, accept=accept)
