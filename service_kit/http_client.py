"""A fast HTTP/1.1 client that only sends POST requests and returns whole replies.

It is used for the requests that every decision of an episode needs, because a request takes a third to a half
of the time that it takes with aiohttp. The client keeps connections alive. It does not support redirects,
cookies, proxies or compression.

The client never sends a request twice, because a server may charge for each request. If the server closes a
connection, even one that was idle before the request, the client raises `NoReply`, and the caller decides
whether to retry. If a request is cancelled, the client closes the connection, so that the server can stop its
work on the request.
"""

import asyncio
import socket
import ssl
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Self

import httptools
from aiohappyeyeballs import start_connection
from yarl import URL

from service_kit.replies import PLAIN, ReplyFault, ReplyTooLarge, refuse_encoded

# Time after which the client closes an idle connection. It is shorter than the idle time-out of servers, so
# that servers rarely close a connection just when a request is sent.
KEEP_ALIVE_S = 15.0
# Largest total size of a reply's heads: the final head, and those of informational replies (status 1xx).
MOST_HEAD_BYTES = 64 << 10
# Delay before the client also tries the next address of the host, such as IPv4 after IPv6 (RFC 8305).
_NEXT_ADDRESS_S = 0.25
# Most transferred bytes per byte of the body. In chunked encoding, a chunk of one byte takes six bytes.
_MOST_FRAMING = 8
_NO_BODY = frozenset({204, 304})
_HEADERS = {"Accept": "*/*", **PLAIN, "User-Agent": "turnwise"}


class NoReply(Exception):
    """The connection could not be established, or it was closed before the reply was complete."""


class ReplyMalformed(ReplyFault):
    """The reply is not valid HTTP/1.1."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Target:
    """A URL and request headers, encoded once because every request to the URL begins with the same bytes.

    Raises:
        ValueError: a header contains a line break, which would start another header.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        place = URL(url)
        self.origin = Origin(place.scheme, place.raw_host or "", place.port or 0)
        lines = [f"POST {place.raw_path_qs} HTTP/1.1", f"Host: {place.host_port_subcomponent}"]
        lines += [f"{name}: {value}" for name, value in {**_HEADERS, **headers}.items()]
        if any(not {"\r", "\n", "\0"}.isdisjoint(line) for line in lines):
            raise ValueError("a header holds a line break")
        self.head = "\r\n".join([*lines, "Content-Length: "]).encode()


@dataclass(frozen=True, slots=True)
class HttpReply:
    status: int
    headers: Mapping[str, str]
    """Maps the lower-case name of each header to its value, or to its first value if it occurs repeatedly."""
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection to a server; it carries at most one request at a time."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpResponseParser(self)
        self._answer: asyncio.Future[HttpReply] | None = None
        self._clear(0)
        self.idle_since_s = 0.0

    def _clear(self, most_bytes: int) -> None:
        self._headers: dict[str, str] = {}
        self._parts: list[bytes] = []
        self._room, self._most_bytes = most_bytes, most_bytes
        self._head_room, self._wire_room = MOST_HEAD_BYTES, MOST_HEAD_BYTES + _MOST_FRAMING * most_bytes
        self._status, self._ends_with_connection = 0, False

    def ask(self, request: bytes, most_bytes: int) -> "asyncio.Future[HttpReply]":
        """Send an encoded request and return a future for its reply; `most_bytes` limits the reply's body."""
        if not self.is_open:  # connection_lost will not be called again, so it could not fail a new future
            raise NoReply("the server closed the connection before the request")
        self._clear(most_bytes)
        self._answer = answer = self._loop.create_future()
        self._transport.write(request)
        return answer

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection immediately; the future of a pending request raises NoReply."""
        self._transport.abort()

    # Methods that asyncio calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # no request waits: do not read these bytes as the next request's reply
            self.close()
            return
        self._wire_room -= len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After a valid head, the server evidently speaks HTTP, and the reply was damaged on its way.
            kind = NoReply if self._status else ReplyMalformed
            self._fail(kind(f"its reply is no HTTP/1.1: {str(error)[:100] or type(error).__name__}"))
        if not self._status and self._wire_room < _MOST_FRAMING * self._most_bytes:
            self._fail(self._head_too_large())
        elif self._wire_room < 0:
            self._fail(ReplyTooLarge(self._most_bytes))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._ends_with_connection and exc is None:
            self._finish()
        reason = f": {exc}" if exc else ""
        self._fail(NoReply(f"the server closed the connection before its reply was complete{reason}"))

    # Methods that httptools calls

    def on_message_begin(self) -> None:
        if self._answer is None:  # the server sends a further reply without a request
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_room -= len(name) + len(value)
        if self._head_room < 0:
            self._fail(self._head_too_large())
        elif not self._status:  # with a status, this is a trailer after the body, which is ignored
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:  # an informational reply; the final reply follows
            self._headers = {}
            return
        self._status = status
        if status == 101:
            self._fail(ReplyMalformed("its reply switches to another protocol"))
        codings = self._headers.get("transfer-encoding")
        try:
            refuse_encoded(self._headers.get("content-encoding"))
            refuse_encoded("identity" if (codings or "").strip().lower() == "chunked" else codings)
        except ReplyFault as fault:
            self._fail(fault)
        self._ends_with_connection = (
            codings is None and "content-length" not in self._headers and status not in _NO_BODY
        )

    def on_body(self, data: bytes) -> None:
        self._room -= len(data)
        if self._room < 0:
            self._fail(ReplyTooLarge(self._most_bytes))
        else:
            self._parts.append(data)

    def on_message_complete(self) -> None:
        if self._status:
            is_kept = self._parser.should_keep_alive() and not self._transport.get_write_buffer_size()
            self._finish()
            if not is_kept:
                self._transport.close()

    @staticmethod
    def _head_too_large() -> ReplyMalformed:
        return ReplyMalformed(f"the head of its reply has more than {MOST_HEAD_BYTES} bytes")

    def _finish(self) -> None:
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_result(HttpReply(self._status, self._headers, b"".join(self._parts)))

    def _fail(self, error: Exception) -> None:
        self.close()
        answer, self._answer = self._answer, None
        if answer is not None and not answer.done():
            answer.set_exception(error)


class HttpClient:
    """Sends POST requests over persistent connections.

    At most `at_most` requests are in progress at the same time; further requests wait. Use a client in one
    event loop only, either as an async context manager or with a call of `close` at the end.
    """

    def __init__(self, *, at_most: int = 100) -> None:
        self._places = asyncio.Semaphore(at_most)
        self._idle: dict[Origin, list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def post(self, target: Target, data: bytes, *, timeout_s: float, most_bytes: int) -> HttpReply:
        """Send a POST request with the body `data` and return the reply, even if its status is an error.

        Args:
            timeout_s: time limit until the reply is complete, including the wait until fewer than `at_most`
                requests are in progress and until a connection is established.
            most_bytes: largest accepted size of the reply's body.

        Raises:
            TimeoutError: the reply was not complete within `timeout_s`.
            NoReply: the connection could not be established, or was closed before the reply was complete.
            ReplyFault: the reply is too large, compressed, or not valid HTTP/1.1.
        """
        async with asyncio.timeout(timeout_s), self._places:
            connection = self._take(target.origin) or await self._connect(target.origin)
            self._busy.add(connection)
            try:
                reply = await connection.ask(b"%b%d\r\n\r\n%b" % (target.head, len(data), data), most_bytes)
            except BaseException:  # includes a cancellation: the server then can stop its work
                connection.close()
                raise
            finally:
                self._busy.discard(connection)
            if connection.is_open:
                self._keep(target.origin, connection)
            return reply

    async def close(self) -> None:
        """Close all connections; pending requests raise NoReply."""
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in (*self._busy, *chain(*self._idle.values())):
            connection.close()
        self._idle.clear()
        await asyncio.sleep(0)  # lets the transports close their sockets

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    def _take(self, origin: Origin) -> _Connection | None:
        idle = self._idle.get(origin, [])
        while idle:
            if (connection := idle.pop()).is_open:
                return connection
        return None

    def _keep(self, origin: Origin, connection: _Connection) -> None:
        loop = asyncio.get_running_loop()
        connection.idle_since_s = loop.time()
        self._idle.setdefault(origin, []).append(connection)
        if self._sweep is None:
            self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_idle)

    def _close_idle(self) -> None:
        loop = asyncio.get_running_loop()
        kept: dict[Origin, list[_Connection]] = {}
        for origin, connections in self._idle.items():
            for connection in connections:
                if loop.time() - connection.idle_since_s >= KEEP_ALIVE_S:
                    connection.close()
                elif connection.is_open:
                    kept.setdefault(origin, []).append(connection)
        self._idle = kept
        self._sweep = loop.call_later(KEEP_ALIVE_S, self._close_idle) if kept else None

    async def _connect(self, origin: Origin) -> _Connection:
        loop, at = asyncio.get_running_loop(), f"{origin.host}:{origin.port}"
        try:
            places = await loop.getaddrinfo(origin.host, origin.port, type=socket.SOCK_STREAM)
            connected = await start_connection(places, happy_eyeballs_delay=_NEXT_ADDRESS_S)
        except OSError as error:
            raise NoReply(f"cannot connect to {at}: {error.strerror or error}") from error
        is_secure = origin.scheme == "https"
        if is_secure and self._tls is None:
            self._tls = ssl.create_default_context()
            self._tls.set_alpn_protocols(["http/1.1"])
        try:
            _, connection = await loop.create_connection(
                _Connection,
                sock=connected,
                ssl=self._tls if is_secure else None,
                server_hostname=origin.host.rstrip(".") if is_secure else None,
            )
        except BaseException as error:
            with suppress(OSError):
                connected.close()
            if isinstance(error, OSError):
                raise NoReply(f"cannot connect to {at}: {error.strerror or error}") from error
            raise
        return connection
