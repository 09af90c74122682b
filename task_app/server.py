"""The task app on a port: bounded connections, and a stop that drains."""

from collections.abc import Callable

from fastapi import FastAPI

from service_kit.connections import ConnectionBounds
from service_kit.server import Server
from task_app.errors import CapacityReached
from task_app.services import Services


def server_of(app: FastAPI, *, ready: Callable[[], None]) -> Server:
    """A server that drains when it is told to stop: still answering, but taking nothing new."""
    services: Services = app.state.services
    settings = services.settings

    async def drain(orphaned: bool) -> None:
        # Without its parent, nobody is left to fetch what would end.
        await services.drain(within_s=0.0 if orphaned else settings.drain_s)

    bounds = ConnectionBounds(
        max_connections=settings.max_connections,
        max_header_s=settings.max_header_s,
        max_header_bytes=settings.max_header_bytes,
        max_body_s=settings.max_body_s,
        too_many=CapacityReached,
    )
    return Server(app, bounds, max_message_bytes=settings.max_body_bytes, ready=ready, stopping=drain)
