"""uvicorn's HTTP connection with limits on the number of connections and on the size and time of a head.

httptools limits neither the size nor the time of headers. Many silent connections would leave no descriptor
for a job's process. uvicorn's own `limit_concurrency` answers with plain text, which our clients cannot read.

A connection also answers some POSTs at once, without a task for each (`Posts`).
"""

import asyncio
import resource
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, cast

from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from service_kit.boundary import Boundary
from service_kit.errors import HeadTooLarge, InternalError, MalformedRequest, ServiceError
from service_kit.gate import LEAVING, WHOLE_BODY, Leaving
from service_kit.problems import Respond, problem_response
from service_kit.settings import ConnectionSettings


class PlainReply(NamedTuple):
    """A complete reply. Header names are lower-case; content-length is added later."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def plain_problem(error: ServiceError) -> PlainReply:
    response = problem_response(error)
    headers = [header for header in response.raw_headers if header[0] != b"content-length"]
    return PlainReply(response.status_code, headers, bytes(response.body))


# By the bytes of a path: the function that answers a POST there at once. If the app has to answer instead,
# the function returns None, and has changed nothing.
Posts = Mapping[bytes, Callable[[Scope, bytes], PlainReply | None]]


def connections_at_most(most: int) -> int:
    """Return the smaller of `most` and half of the descriptors that the process may open (`ulimit -n`).

    The other half remains for outgoing calls, files and the database.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))


def bounded_protocol(
    settings: ConnectionSettings, respond: Respond, too_many: type[ServiceError], posts: Posts
) -> type[asyncio.Protocol]:
    """Make the connection class of a server with these limits; uvicorn creates an object per connection."""
    most = connections_at_most(settings.max_connections)

    class Connection(BoundedConnection):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.settings, self.most, self.respond, self.too_many = settings, most, respond, too_many
            self.posts = posts

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection that does not send a complete head within `max_header_s`.

    After a reply the client has `max_body_s` for the rest of its body. A client that reads the reply only
    after it has sent its body thus gets the reply, and a client that sends single bytes is disconnected.
    """

    settings: ConnectionSettings
    most: int
    respond: Respond
    too_many: type[ServiceError]
    posts: Posts

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._silence: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = False
        self._received_bytes = 0  # of the current request
        self._head_bytes = 0  # of the complete lines of its head
        # The received part of a body that may be answered at once; None if the app gets the body.
        self._body: bytes | None = None
        self._leaving = Leaving()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.most and not self._close_silent_connection():
            self._refuse(self.too_many(f"{self.most} connections are open, the most that this service holds"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)
        self._leaving.tell()

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._received_bytes += len(data)
        super().data_received(data)
        if self._body is not None:  # the body is not complete yet
            self._pass_on()
        if self._in_head and self._received_bytes > self.settings.max_header_bytes:
            # httptools does not call on_header for a line without an end.
            self.send_400_response("")
        elif self._silence is None and (self._in_head or self._is_idle()):
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(": \r\n"))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head, self._in_body = False, True
        self._expect_nothing()
        if self.url in self.posts and self._may_answer():
            self._body = b""
        else:
            super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if self._body is None:
            super().on_body(body)
        else:
            self._body += body

    def on_message_complete(self) -> None:
        self._in_body, self._received_bytes, self._head_bytes = False, 0, 0
        if self._body is not None:
            if self._answer(self._body):
                self._body = None
                return
            self._pass_on()
        super().on_message_complete()
        if not self.pipeline:
            # A large body pauses reading, and a lost connection is noticed only while reading.
            self.flow.resume_reading()
        cast(Scope, self.scope)["extensions"] = {WHOLE_BODY: {}, LEAVING: self._leaving}
        self._expect_nothing()

    def _may_answer(self) -> bool:
        """Whether the connection's state and the request's head permit an answer without the app."""
        parser, cycle = self.parser, self.cycle
        return (
            (cycle is None or cycle.response_complete)
            and not (self.flow.write_paused or self.expect_100_continue)
            and parser.get_method() == b"POST"
            and parser.get_http_version() == "1.1"
            and parser.should_keep_alive()
            and not parser.should_upgrade()
        )

    def _answer(self, body: bytes) -> bool:
        """Answer the request at once; return False if the app has to answer."""
        path, scope = self.url.decode(), cast(Scope, self.scope)
        scope.update(method="POST", path=path, raw_path=self.url, query_string=b"")
        try:
            with Boundary(f"POST {path}", InternalError):
                reply = self.posts[self.url](scope, body)
        except InternalError as error:
            self._refuse(error)
            return True
        if reply is None:
            return False
        length = b"content-length: %d\r\n\r\n" % len(reply.body)
        headers = [*self.server_state.default_headers, *reply.headers]
        head = [STATUS_LINE[reply.status], *[b"%b: %b\r\n" % header for header in headers], length]
        self.transport.write(b"".join([*head, reply.body]))
        super().on_response_complete()
        return True

    def _pass_on(self) -> None:
        """Begin the request in the app with the received part of the body."""
        body, self._body = self._body, None
        super().on_headers_complete()
        if body:
            super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:
            self._expect_nothing()
            self._silence = self.loop.call_later(self.settings.max_body_s, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """Reply with a problem to a request that is no HTTP or whose head is too large."""
        most = self.settings.max_header_bytes
        if max(self._head_bytes, self._received_bytes if self._in_head else 0) > most:
            self._refuse(HeadTooLarge(f"the request's head is larger than {most} bytes", where="headers"))
        else:
            self._refuse(MalformedRequest("this is no HTTP request"))

    def _count_head(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > self.settings.max_header_bytes:
            raise ValueError("too large")  # httptools then calls send_400_response

    def _is_idle(self) -> bool:
        """Whether neither a request nor uvicorn's timer runs; data that begins no request stops the timer."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self._in_body and self.timeout_keep_alive_task is None

    def _close_silent_connection(self) -> bool:
        """Close the connection that has waited longest for a head or the rest of a body.

        An active client is thus never refused because of idle ones. Return False if all others are active.
        """
        silent = [
            (other._silence.when(), id(other), other)
            for other in self.connections
            if isinstance(other, BoundedConnection)
            and other._silence is not None
            and not other.transport.is_closing()
        ]
        if silent:
            min(silent)[2].transport.close()
        return bool(silent)

    def _expect_head(self) -> None:
        self._silence = self.loop.call_later(self.settings.max_header_s, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _refuse(self, error: ServiceError) -> None:
        """Write the reply to the error and close the connection; the app has no request to answer yet."""
        if self.transport.is_closing():
            return
        reply = self.respond(error)
        head = [f"HTTP/1.1 {reply.status_code} {HTTPStatus(reply.status_code).phrase}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1") + bytes(reply.body))
        self.transport.close()
