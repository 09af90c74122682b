"""uvicorn's HTTP connection with limits: on the number, on the size of a request's head, and on its time.

httptools reads headers without limits and waits for ever, and enough silent connections leave no descriptor
for a job's process. uvicorn's own `limit_concurrency` answers with plain text, which our clients cannot read.

A connection also answers the POSTs that a service can answer at once (`Posts`), without a task for each.
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
    """A whole reply; the headers have lower-case names, and no content-length."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def plain_problem(error: ServiceError) -> PlainReply:
    """The reply to an error."""
    response = problem_response(error)
    headers = [header for header in response.raw_headers if header[0] != b"content-length"]
    return PlainReply(response.status_code, headers, bytes(response.body))


# By the bytes of a path: what answers a POST there at once. It returns None, with nothing done, for a request
# that the app has to answer.
Posts = Mapping[bytes, Callable[[Scope, bytes], PlainReply | None]]


def connections_at_most(most: int) -> int:
    """The smaller of `most` and half of the descriptors that the process may open (`ulimit -n`).

    The other half is for its own calls, files and database; without a descriptor a process can neither accept
    nor write.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))


def bounded_protocol(
    settings: ConnectionSettings, respond: Respond, too_many: type[ServiceError], posts: Posts
) -> type[asyncio.Protocol]:
    """The connection class of a server with these limits; uvicorn makes one object for each connection."""
    most = connections_at_most(settings.max_connections)

    class Connection(BoundedConnection):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.settings, self.most, self.respond, self.too_many = settings, most, respond, too_many
            self.posts = posts

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection that does not send a complete head within `max_header_s`.

    After a reply the client has `max_body_s` for the rest of its body: a client that reads the reply only
    after its body must not lose it, and one that sends a byte now and then must not stay.
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
        # Bytes of the current head: all received ones, and those of its complete lines.
        self._received_bytes = 0
        self._head_bytes = 0
        # The body so far of a request that may be answered at once; None: the app has it.
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
        if self._body is not None:  # which has not come at once
            self._pass_on()
        if self._in_head and self._received_bytes > self.settings.max_header_bytes:
            # A line without an end never reaches on_header.
            self.send_400_response("")
        elif self._silence is None and (self._in_head or self._is_idle()):
            self._expect_head()

    def on_message_begin(self) -> None:
        self._in_head = True
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value) + len(": \r\n"))
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
            # A large body pauses the reading, and without reading no lost connection is noticed.
            self.flow.resume_reading()
        cast(Scope, self.scope)["extensions"] = {WHOLE_BODY: {}, LEAVING: self._leaving}
        self._expect_nothing()

    def _may_answer(self) -> bool:
        """Whether nothing is in the way of an answer to the request whose head is here."""
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
        """Answer the request at once; False if the app has to."""
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
        """Begin the request in the app, with the body so far."""
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
        """Reply to a request that httptools cannot read, or whose head is too large, with a problem."""
        most = self.settings.max_header_bytes
        if max(self._head_bytes, self._received_bytes if self._in_head else 0) > most:
            self._refuse(HeadTooLarge(f"the request's head is larger than {most} bytes", where="headers"))
        else:
            self._refuse(MalformedRequest("this is no HTTP request"))

    def _count(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > self.settings.max_header_bytes:
            raise ValueError("too large")  # httptools then calls send_400_response

    def _is_idle(self) -> bool:
        """Whether nothing is under way and uvicorn's own timer was stopped by data that began no request."""
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self._in_body and self.timeout_keep_alive_task is None

    def _close_silent_connection(self) -> bool:
        """Close the connection that has owed a head, or the rest of a body, for longest.

        Idle connections thus keep no active client away. False if all others are active.
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
        """Write the reply byte for byte, because there is no request yet that the app could answer."""
        if self.transport.is_closing():
            return
        reply = self.respond(error)
        head = [f"HTTP/1.1 {reply.status_code} {HTTPStatus(reply.status_code).phrase}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1") + bytes(reply.body))
        self.transport.close()
