"""ASGI middleware around everything: a request gets an id, a place in the metrics, a line at debug level.

The id is the caller's `X-Request-ID` where it is fit for a log, else made here. It comes back as a header,
and stands in every line that is logged while the request runs.
"""

import logging
import random
import re
import time

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from task_app.guards.auth import Keys, credentials, presented_keys
from task_app.observing.metrics import NO_ROUTE, Metrics

log = structlog.get_logger("task_app")

HEADER = b"x-request-id"
# Nothing was answered: faults of the app are answered with 500 inside, so the client must have left.
CLIENT_GONE = 499
_FIT = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class Observed:
    """Wraps the app; nothing is read of a body, and nothing kept of a request but counts."""

    def __init__(self, app: ASGIApp, *, metrics: Metrics, keys: Keys) -> None:
        self._app = app
        self._metrics = metrics
        self._keys = keys
        # Asked once: a line that is not written costs as much as a world's step.
        self._debug = log.is_enabled_for(logging.DEBUG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = request_id_of(scope, self._keys)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id.decode("ascii"))
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message = {**message, "headers": [*message.get("headers", ()), (HEADER, request_id)]}
            await send(message)

        started_s = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            took_s = time.perf_counter() - started_s
            method, route = scope["method"], route_of(scope)
            self._metrics.request_ended(method, route, status, took_s)
            if self._debug:
                log.debug("request", method=method, route=route, status=status, took_s=round(took_s, 6))


def request_id_of(scope: Scope, keys: Keys) -> bytes:
    """The caller's id, unless it is unfit for a log, is a key, or holds one that this request presents."""
    found = next((value for name, value in scope["headers"] if name == HEADER), b"")
    if (
        found
        and _FIT.fullmatch(found)
        and not keys.match([(b"x-api-key", found)])
        and not any(key in found for key in presented_keys(credentials(scope)))
    ):
        return found
    # No secret: the system's own randomness would cost a call of the system.
    return b"%016x" % random.getrandbits(64)


def route_of(scope: Scope) -> str:
    """The template of the route that answered, such as /env/{env_id}/frame; `none` if no route did."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else NO_ROUTE
