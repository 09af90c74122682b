"""Counts what the service answers, and how long that takes, for /metrics; as ASGI middleware."""

import time
from collections import Counter
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_STREAM = "/jobs/{job_id}/events"
_NO_ROUTE = "none"
# What HTTP calls a method is any word: a stranger's own must make no new series, nor stay in memory.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_OTHER = "other"


@dataclass(slots=True)
class Requests:
    """Since the start. `answered` by method, route and status; `seconds` by route, streams left out."""

    answered: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    seconds: Counter[str] = field(default_factory=Counter)


class Observed:
    """Wraps the app; a request that no route took has the route `none`, so that paths make no new series."""

    def __init__(self, app: ASGIApp, requests: Requests) -> None:
        self._app, self._requests = app, requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()

        async def noted(message: Message) -> None:
            if message["type"] == "http.response.start":
                route = _route_of(scope)
                method = scope["method"] if scope["method"] in _METHODS else _OTHER
                self._requests.answered[method, route, message["status"]] += 1
                if route != _STREAM:
                    self._requests.seconds[route] += time.monotonic() - started  # type: ignore[assignment]
            await send(message)

        await self._app(scope, receive, noted)


def _route_of(scope: Scope) -> str:
    return str(getattr(scope.get("route"), "path", _NO_ROUTE))
