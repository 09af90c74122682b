"""A lean HTTP/1.1 client that sends POSTs and returns whole replies, for the requests of every decision.

A request takes a third to a half of aiohttp's time. The client keeps connections alive, and supports no
redirects, cookies, proxies or compression.

No request is sent twice, because servers may bill each one. A kept connection that the server has closed
raises `NoReply` like any other loss; the caller decides whether to retry. A cancelled request closes its
connection, so that the server can stop working on it.
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

# Shorter than the idle time-out of servers, so that few requests use a connection that is about to close.
KEEP_ALIVE_S = 15.0
# Limit of all heads of a reply together, including early hints (status 1xx).
MOST_HEAD_BYTES = 64 << 10
# Delay before an address of the other family is tried too (RFC 8305).
_NEXT_ADDRESS_S = 0.25
# Most bytes on the wire per byte of the body; a chunk of one byte takes six.
_MOST_FRAMING = 8
_NO_BODY = frozenset({204, 304})
_HEADERS = {"Accept": "*/*", **PLAIN, "User-Agent": "turnwise"}


class NoReply(Exception):
    """The connection could not be made, or it ended before the reply did."""


class ReplyMalformed(ReplyFault):
    """The server does not speak HTTP/1.1."""


class Origin(NamedTuple):
    scheme: str
    host: str
    port: int


class Target:
    """A URL and the headers of its requests, encoded once as the bytes that begin each request.

    Raises:
        ValueError: a header holds a line break, which would start another header.
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
    """First value of each header, by its lower-case name."""
    body: bytes


class _Connection(asyncio.Protocol):
    """One connection; it has at most one request at a time."""

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
        """Send a request, and return the future of its reply."""
        if not self.is_open:  # connection_lost was called before and will not be called again
            raise NoReply("the server closed the connection before the request")
        self._clear(most_bytes)
        self._answer = answer = self._loop.create_future()
        self._transport.write(request)
        return answer

    @property
    def is_open(self) -> bool:
        return not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection at once; a pending request gets no reply."""
        self._transport.abort()

    # asyncio's calls

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if self._answer is None:  # unrequested bytes must not become the next reply
            self.close()
            return
        self._wire_room -= len(data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            # After a valid head the server does speak HTTP, so the reply was damaged in transit.
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

    # httptools' calls

    def on_message_begin(self) -> None:
        if self._answer is None:  # a second reply follows the first without a request
            self.close()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head_room -= len(name) + len(value)
        if self._head_room < 0:
            self._fail(self._head_too_large())
        elif not self._status:  # a trailer is not read
            self._headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200 and status != 101:  # an early hint; the reply follows
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
    """Sends requests over persistent connections, `at_most` requests at a time; further ones wait.

    A client belongs to one event loop. Use it as an async context manager, or call `close`.
    """

    def __init__(self, *, at_most: int = 100) -> None:
        self._places = asyncio.Semaphore(at_most)
        self._idle: dict[Origin, list[_Connection]] = {}
        self._busy: set[_Connection] = set()
        self._sweep: asyncio.TimerHandle | None = None
        self._tls: ssl.SSLContext | None = None

    async def post(self, target: Target, data: bytes, *, timeout_s: float, most_bytes: int) -> HttpReply:
        """Send a request, and return its reply, whatever its status.

        Args:
            timeout_s: includes the wait for other requests and for a connection.
            most_bytes: largest body of the reply.

        Raises:
            TimeoutError: the reply was not complete in time.
            NoReply: the connection could not be made, or ended before the reply did.
            ReplyFault: the reply is too large, encoded, or not HTTP.
        """
        async with asyncio.timeout(timeout_s), self._places:
            connection = self._take(target.origin) or await self._connect(target.origin)
            self._busy.add(connection)
            try:
                reply = await connection.ask(b"%b%d\r\n\r\n%b" % (target.head, len(data), data), most_bytes)
            except BaseException:  # also a cancellation, so that the server can stop its work
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
        await asyncio.sleep(0)  # the transports close their sockets

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
