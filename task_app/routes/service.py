"""Who is there: / and /health."""

from typing import Any

from fastapi import APIRouter, Request

from service_kit.errors import NoKeyConfigured
from service_kit.keys import presented_keys
from task_app.errors import ShuttingDown
from task_app.services import services_of

router = APIRouter(tags=["service"])

SERVICE = "turnwise-task-app"


@router.head("/", include_in_schema=False)
@router.get("/")
async def root() -> dict[str, str]:
    return {"status": "ok", "service": SERVICE}


@router.get("/health")
async def health(request: Request) -> dict[str, Any]:
    """Open to all; a request that presents a key also learns whether it is good."""
    keys = services_of(request).keys
    if not keys.configured:
        raise NoKeyConfigured(keys.variable)
    if services_of(request).draining:
        raise ShuttingDown(
            "draining: what runs may end and be fetched, nothing new is taken", code="draining"
        )
    answer: dict[str, Any] = {"healthy": True, "status": "healthy", "auth": {"required": True}}
    answer["service"] = {"base_url": str(request.base_url).rstrip("/")}
    headers = request.scope["headers"]
    if presented_keys(headers):
        answer["authorized"] = keys.match(headers)
    return answer
