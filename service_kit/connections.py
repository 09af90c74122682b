"""uvicorn's HTTP connection class, extended by limits on open connections and on request heads.

A head is the request line and the headers. uvicorn's parser, httptools, limits neither the size of a head nor
the time until it is complete. Without a limit, idle connections could use up all file descriptors, and a job
could then start no process. uvicorn's own `limit_concurrency` replies with plain text, but our clients expect
JSON.

A connection also answers the POSTs to some paths itself, without starting an asyncio task (see `Posts`).
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
    """A complete HTTP reply. Header names are in lower case; the connection adds content-length."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def plain_problem(error: ServiceError) -> PlainReply:
    response = problem_response(error)
    headers = [header for header in response.raw_headers if header[0] != b"content-length"]
    return PlainReply(response.status_code, headers, bytes(response.body))


# Maps a path, as bytes, to the function that answers POSTs to this path without the app. The function returns
# None if the app has to answer instead; in this case the function must not have changed any state.
Posts = Mapping[bytes, Callable[[Scope, bytes], PlainReply | None]]


def connections_at_most(most: int) -> int:
    """Return `most`, but at most half of the file descriptors that the process may open (`ulimit -n`).

    The other half of the descriptors is reserved for outgoing connections, files and the database.
    """
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return most if soft == resource.RLIM_INFINITY else max(1, min(most, soft // 2))


def bounded_protocol(
    settings: ConnectionSettings, respond: Respond, too_many: type[ServiceError], posts: Posts
) -> type[asyncio.Protocol]:
    """Return a connection class with these limits; uvicorn instantiates it for each connection."""
    most = connections_at_most(settings.max_connections)

    class Connection(BoundedConnection):
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.settings, self.most, self.respond, self.too_many = settings, most, respond, too_many
            self.posts = posts

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """An HTTP connection of uvicorn with the limits of `settings`.

    A connection is closed if the head of a request is not complete within `max_header_s`. A head that is
    larger than `max_header_bytes` gets an error as its reply. Above `most` connections, each new connection
    replaces an idle one, or is refused with the error `too_many` if no connection is idle.

    If the reply is sent before the request's body has arrived, the client has `max_body_s` to send the rest.
    A client that reads only after it has sent its body thus still gets the reply.
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
        self._received_bytes = 0  # bytes of the current request
        self._head_bytes = 0  # bytes of the complete lines in the head of the current request
        # The received part of the body, if this connection may answer the request itself; otherwise None.
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
        if self._body is not None:  # the body is incomplete: let the app wait for the rest
            self._pass_on()
        if self._in_head and self._received_bytes > self.settings.max_header_bytes:
            # httptools calls on_header only at the end of a line, so on_header cannot stop an endless line.
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
            # uvicorn pauses reading while it holds a large body, and while paused it cannot notice that the
            # client disconnects.
            self.flow.resume_reading()
        cast(Scope, self.scope)["extensions"] = {WHOLE_BODY: {}, LEAVING: self._leaving}
        self._expect_nothing()

    def _may_answer(self) -> bool:
        """Whether the state of the connection and the head of the request allow an answer without the app."""
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
        """Answer the request without the app. Return False, with nothing sent, if the app has to answer."""
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
        """Hand the request over to the app, with the part of the body that was received so far."""
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
        """Reply with a JSON error to a request that is not valid HTTP or whose head is too large."""
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
        """Whether the connection waits for a request while uvicorn's keep-alive timer does not run.

        Any received data stops uvicorn's timer, even data that does not begin a request.
        """
        is_answered = self.cycle is None or self.cycle.response_complete
        return is_answered and not self._in_body and self.timeout_keep_alive_task is None

    def _close_silent_connection(self) -> bool:
        """Make room for a new connection by closing the idle connection whose time limit ends first.

        A connection is idle while it waits for a head or for the rest of an answered request's body. Return
        False if no connection is idle.
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
        """Reply with the error and close the connection, for a request that the app has not received."""
        if self.transport.is_closing():
            return
        reply = self.respond(error)
        head = [f"HTTP/1.1 {reply.status_code} {HTTPStatus(reply.status_code).phrase}", "connection: close"]
        head += [f"{name}: {value}" for name, value in reply.headers.items()]
        self.transport.write("\r\n".join([*head, "", ""]).encode("latin-1") + bytes(reply.body))
        self.transport.close()
