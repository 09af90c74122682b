"""Whether the service lives, and what it is."""

from importlib.metadata import version
from typing import Any, Literal

from fastapi import APIRouter, Request

from shared_schemas.base import Body
from trainer_backend.api.service import service_of

router = APIRouter(tags=["service"])

SERVICE = "turnwise-trainer"


class Health(Body):
    """`store`: whether the database answered when it was last asked. Jobs go on without it."""

    status: Literal["ok"] = "ok"
    service: str = SERVICE
    store: Literal["up", "away"]


@router.get("/health")
async def health(request: Request) -> Health:
    """Alive; needs no key."""
    return Health(store="up" if service_of(request).watcher.looked.store_up else "away")


@router.get("/info")
async def info(request: Request) -> dict[str, Any]:
    """What the service runs, and what a posted job may name."""
    service = service_of(request)
    bounds, rules = service.settings.bounds, service.settings.rules
    return {
        "service": {"name": SERVICE, "version": version("turnwise"), "home": service.data.home},
        "store": service.store.shown,
        "data_dir": str(service.data.path),
        "runs_jobs": service.supervisor is not None,
        "limits": {
            "max_jobs": rules.max_jobs,
            "restarts": rules.restarts,
            "stop_grace_s": rules.grace_s,
            "max_body_bytes": service.settings.max_body_bytes,
            "max_streams": service.settings.max_streams,
        },
        "posted_jobs": {
            "roots": [*map(str, bounds.roots), str(bounds.data_dir)],
            "task_urls": sorted(bounds.task_urls),
            "inference_hosts": sorted(bounds.inference_hosts),
            "key_variables": sorted(bounds.key_variables),
            "models": list(bounds.models),
            "gateway_host": bounds.gateway_host,
        },
    }
