"""ASGI middleware that gives each request an id, counts requests for metrics, and logs them at level debug.

A request's id is the value of its header `X-Request-ID` if this value is safe to log; otherwise it is a new
random id. The reply returns the id in the same header, and every log line of the request contains the id.
This middleware is the outermost one of a service.
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
# This header stops browsers from guessing the media type of a reply, such as HTML for the text of a log.
_NO_SNIFFING = (b"x-content-type-options", b"nosniff")
# Status that is counted for a request without a reply. The app replies even to its own errors, with a 500, so
# a missing reply means that the client disconnected.
CLIENT_GONE = 499
_FIT = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")
# Upper edges of the buckets: an env step takes tenths of a millisecond, a long poll up to half a minute.
LATENCY_EDGES_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0,
)  # fmt: skip
# All other methods are counted under one label, so that a client cannot create new metric series at will.
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_NO_ROUTE = "none"


@dataclass(slots=True)
class Histogram:
    """Counts durations by bucket. LATENCY_EDGES_S are the buckets' upper edges; the last bucket has none."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_EDGES_S) + 1))
    sum_s: float = 0.0

    def observe(self, value_s: float) -> None:
        self.counts[bisect_left(LATENCY_EDGES_S, value_s)] += 1
        self.sum_s += value_s

    def cumulative(self) -> list[tuple[str, int]]:
        """Return, for each upper edge, the edge as text and the number of durations up to it.

        The last edge is "+Inf".
        """
        edges = [*(f"{edge:g}" for edge in LATENCY_EDGES_S), "+Inf"]
        return [(edge, sum(self.counts[: index + 1])) for index, edge in enumerate(edges)]


@dataclass(slots=True)
class Requests:
    """Counts and durations of the requests since the service started; not thread-safe."""

    replies: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    """Number of requests by method, route template and status.

    A template such as /env/{env_id}/frame replaces the path, so that metric labels contain no ids.
    """
    latency: defaultdict[str, Histogram] = field(default_factory=lambda: defaultdict(Histogram))
    """Durations by route template, from the arrival of a request's head to the end of its reply."""

    def count(self, method: str, route: str, status: int) -> None:
        self.replies[method if method in _METHODS else "other", route, status] += 1

    def observe(self, route: str, duration_s: float) -> None:
        self.latency[route].observe(duration_s)

    def reply_family(self, name: str) -> "Metric":
        """Return the counts in `replies` as a Prometheus metric with this name."""
        from prometheus_client.core import CounterMetricFamily

        family = CounterMetricFamily(
            name, "Requests that were answered.", labels=["method", "route", "status"]
        )
        for (method, route, status), count in self.replies.items():
            family.add_metric([method, route, str(status)], count)
        return family


class RequestObserver:
    """ASGI middleware that sets the id of each request, and counts and logs requests (see the module).

    Args:
        requests: receives the counts and durations.
        keys: the service's API keys. An id that a client sends is replaced if it is one of these keys, or if
            it contains a key that the request sends.
        streams: route templates whose durations are not counted, because the client decides when the reply
            of such a route ends.
    """

    def __init__(self, app: ASGIApp, *, requests: Requests, keys: Keys, streams: Iterable[str] = ()) -> None:
        self._app, self._requests, self._keys = app, requests, keys
        self._streams = frozenset(streams)
        # Check the level only once: even a call that logs nothing takes as long as an env step.
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
        """Call `plain`, which may answer the request without the app (see service_kit.connections.Posts).

        Count and return the reply of `plain`, with the request's id added. If `plain` returns None, count
        nothing and return None.
        """
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
        """Choose the request's id, bind it to the log's context, and return it."""
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
    """Return a reply's headers, extended by the request's id and `x-content-type-options: nosniff`."""
    named = [*headers, (HEADER, request_id)]
    if all([name != _NO_SNIFFING[0] for name, _ in named]):
        named.append(_NO_SNIFFING)
    return named


def choose_request_id(scope: Scope, keys: Keys) -> bytes:
    """Return the id that the client sent, if it is safe to log; otherwise return a new random id.

    An id is unsafe if it is too long, contains unusual characters, is an API key of the service, or contains
    a key that the request sends.
    """
    headers = scope["headers"]
    caller_id = next((value for name, value in headers if name == HEADER), b"")
    if (
        caller_id
        and _FIT.fullmatch(caller_id)
        and not keys.match([(b"x-api-key", caller_id)])
        and not any(key in caller_id for key in (*presented_keys(headers), *basic_passwords(headers)))
    ):
        return caller_id
    # An id is not a secret, so a fast random number without a system call is sufficient.
    return b"%016x" % random.getrandbits(64)


def find_route(scope: Scope) -> str:
    """Return the template of the route that handled the request, such as /env/{env_id}/frame.

    Return `none` if no route matched the path.
    """
    path = getattr(scope.get("route"), "path", None)
    return path if isinstance(path, str) else _NO_ROUTE


# Describes the reply to a Prometheus scraper in /openapi.json, for each possible media type.
METRICS_CONTENT = {
    media_type: {"schema": {"type": "string"}}
    for media_type in ("text/plain", "application/openmetrics-text")
}


def metrics_response(collect: Callable[[], Iterable["Metric"]], *, accept: str) -> Response:
    """Return the reply to a Prometheus scraper, with the metrics of `collect` and of this process.

    `accept` is the scraper's Accept header, which determines the format.
    """
    # Import late: most task apps are never scraped, and a task app that a job starts must start fast.
    from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector, disable_created_metrics
    from prometheus_client.exposition import choose_encoder
    from prometheus_client.registry import Collector

    class Service(Collector):
        def collect(self) -> Iterable["Metric"]:
            return collect()

    # Otherwise each counter would get a second series, with the time at which the counter was created.
    disable_created_metrics()  # type: ignore[no-untyped-call]
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Service())
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)
    encode, media_type = choose_encoder(accept)
    return Response(encode(registry), headers={"Content-Type": media_type})
