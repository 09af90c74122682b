"""The outermost ASGI middleware: gives each request an id, counts it, and logs it at level debug.

The id is the caller's `X-Request-ID` if a log may contain that, otherwise a new one. The reply has the id in
a header, and every log line of the request contains it.
"""

import logging
import random
import re
import time
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING

import structlog
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service_kit.connections import PlainReply
from service_kit.keys import Keys, basic_passwords, presented_keys

if TYPE_CHECKING:
    from prometheus_client import Metric

log = structlog.get_logger("service")

HEADER = b"x-request-id"
# Prevents browsers from guessing a reply's type, such as showing a log as a page.
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
# Status of a request without a reply. Errors of the app get a 500, so the client must have disconnected.
CLIENT_GONE = 499
_FIT = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
# Upper edges in seconds: a step takes tenths of a millisecond, a long poll up to half a minute.
LATENCY_EDGES_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# Other methods share one label, so that a client cannot create metric series.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"


@dataclass(slots=True)
class Histogram:
    """Observations by bucket; the last bucket has no upper edge."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_EDGES_S) + 1))
    sum_s: float = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(LATENCY_EDGES_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, int]]:
        """Return pairs of an upper edge and the number of observations up to it; the last edge is "+Inf"."""
        edges = [*(f"{edge:g}" for edge in LATENCY_EDGES_S), "+Inf"]
        return [(edge, sum(self.counts[: index + 1])) for index, edge in enumerate(edges)]


@dataclass(slots=True)
class Requests:
    """Counts of requests since the service's start; not thread-safe."""

    replies: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """Number by method, route template and status; a template keeps ids of a path out of the labels."""
    latency: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    """Durations by route, from the request's head to the reply's end."""

    def count(self, method: str, route: str, status: int) -> None:
        self.replies[method if method in _METHODS else "other", route, status] += 1

    def observe(self, route: str, duration_s: float) -> None:
        self.latency[route].observe(duration_s)

    def reply_family(self, name: str) -> "Metric":
        """Return the counts of replies as a Prometheus metric."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            name, "Requests that were answered.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in self.replies.items():
            family.add_metric([method, route, str(status)], count)
        return family


class RequestObserver:
    """Wraps the app; reads no body, and stores only counts.

    A caller's id that is one of `keys`, or contains a key of the request, is replaced. Durations of the
    routes in `streams` are not counted, because the clients decide when such a reply ends.
    """

    def __init__(self, app: ASGIApp, *, requests: Requests, keys: Keys, streams: Iterable[str] = ()) -> None:
        self._app, self._requests, self._keys = app, requests, keys
        self._streams = frozenset(streams)
        # Checked once, because a disabled log call takes as long as an env step.
        self._debug = log.is_enabled_for(logging.DEBUG)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        request_id = self._begin(scope)
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        status = CLIENT_GONE

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                self._requests.count(scope["method"], find_route(scope), status)
                message = {**message, "headers": _with_id(message.get("headers", ()), request_id)}
            await send(message)

        start_s = time.perf_counter()
        try:
            await self._app(scope, receive, send_with_id)
        finally:
            if status == CLIENT_GONE:
                self._requests.count(scope["method"], find_route(scope), status)
            self._end(scope, status, start_s)

    def answer(
        self, plain: Callable[[Scope, bytes], PlainReply | None], scope: Scope, body: bytes
    ) -> PlainReply | None:
        """Return and count the reply of `plain` (service_kit.connections.Posts); None if it returns none."""
        start_s = time.perf_counter()
        request_id = self._begin(scope)
        try:
            reply = plain(scope, body)
        except Exception:
            self._count_reply(scope, HTTPStatus.INTERNAL_SERVER_ERROR, start_s)
            raise
        if reply is None:
            return None
        self._count_reply(scope, reply.status, start_s)
        return reply._replace(headers=_with_id(reply.headers, request_id))

    def _count_reply(self, scope: Scope, status: int, start_s: float) -> None:
        self._requests.count(scope["method"], find_route(scope), status)
        self._end(scope, status, start_s)

    def _begin(self, scope: Scope) -> bytes:
        """Choose the request's id and bind it to the log."""
        request_id = choose_request_id(scope, self._keys)
        structlog.contextvars.clear_contextvars()
        structlog.contextvars.bind_contextvars(request_id=request_id.decode("ascii"))
        return request_id

    def _end(self, scope: Scope, status: int, start_s: float) -> None:
        duration_s = time.perf_counter() - start_s
        method, route = scope["method"], find_route(scope)
        if route not in self._streams:
            self._requests.observe(route, duration_s)
        if self._debug:
            log.debug("request", method=method, route=route, status=status, took_s=round(duration_s, 6))


def _with_id(headers: Iterable[tuple[bytes, bytes]], request_id: bytes) -> list[tuple[bytes, bytes]]:
    """Add the request's id and `nosniff` to a reply's headers."""
    named = [*headers, (HEADER, request_id)]
    if all([name != _NO_SNIFFING[0] for name, _ in named]):
        named.append(_NO_SNIFFING)
    return named


def choose_request_id(scope: Scope, keys: Keys) -> bytes:
    """Return the caller's id; a new one if that is missing, unfit or a key, or contains the request's key."""
    headers = scope["headers"]
    caller_id = next((value for name, value in headers if name == HEADER), b"")
    if (
        caller_id
        and _FIT.fullmatch(caller_id)
        and not keys.match([(b"x-api-key", caller_id)])
        and not any(key in caller_id for key in (*presented_keys(headers), *basic_passwords(headers)))
    ):
        return caller_id
    # An id is not secret, so no system call for secure randomness is needed.
    return b"%016x" % random.getrandbits(64)


def find_route(scope: Scope) -> str:
    """Return the template of the route that replied, as /env/{env_id}/frame; `none` without a route."""
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE


# Media types of a reply to a Prometheus scraper, for /openapi.json.
METRICS_CONTENT = {
    media_type: {"schema": {"type": "string"}}
    for media_type in ("text/plain", "application/openmetrics-text")
}


def metrics_response(collect: Callable[[], Iterable["Metric"]], *, accept: str) -> Response:
    """Return the reply to a Prometheus scraper: the metrics of `collect`, and those of this process."""
    # Imported late: most task apps are never scraped, and one that a job starts must start fast.
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, disable_created_metrics
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    class Service(Collector):
        def collect(self) -> Iterable["Metric"]:
            return collect()

    # Otherwise each counter has a second series with the time of the service's start.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Service())
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    encode, media_type = choose_encoder(accept)
    return Response(encode(registry), headers={"Content-Type": media_type})
