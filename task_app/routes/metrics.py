"""GET /metrics: what a Prometheus scraper reads."""

from fastapi import APIRouter, Request
from starlette.responses import Response

from service_kit.observed import metrics_response
from task_app.services import services_of

router = APIRouter(tags=["service"])


@router.get("/metrics", response_class=Response)
async def metrics(request: Request) -> Response:
    """Counts, latencies and what is held, in Prometheus' text format (docs/operations.md)."""
    # Here, because most task apps are never scraped, and a trainer's embedded one should start fast.
    from task_app.observing.exposition import families

    services, sockets = services_of(request), request.app.state.openenv_sockets.open
    return metrics_response(
        lambda: families(services, version=request.app.version, sockets=sockets),
        accept=request.headers.get("accept", ""),
    )
