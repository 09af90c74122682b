"""uvicorn's HTTP connection, bounded: in number, in what comes before a request, and in how long that takes.

httptools reads headers without end and waits for them for ever; uvicorn's own `limit_concurrency` answers a
plain text that no client of ours reads.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from shared_schemas.descriptors import connections_at_most
from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from task_app.errors import CapacityReached, HeadTooLarge, MalformedRequest, TaskAppError
from task_app.guards.gate import WHOLE_BODY
from task_app.routes.problems import problem_of
from task_app.settings import Settings


def bounded_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The class of connections of a server with these settings; uvicorn makes one object a connection."""

    class Connection(BoundedConnection):
        bounds = settings
        most = connections_at_most(settings.max_connections)

    return Connection


class BoundedConnection(HttpToolsProtocol):
    """Closes a connection that says nothing, or not the whole of a request's head, for `max_header_s`.

    And one that is answered, but goes on with the body for `max_body_s`: a client that reads its answer at
    the end of its body must not lose it, a stranger who sends a byte now and then must not stay.
    """

    bounds: Settings
    most: int

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._silence: asyncio.TimerHandle | None = None
        self._in_head = self._in_body = False
        # Of the head that is coming: bytes that came, and those of its complete lines.
        self._came_bytes = 0
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.most
        if len(self.connections) > most:
            self._refuse(CapacityReached(f"{most} connections are open, the most that this task app holds"))
        else:
            self._expect_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect_nothing()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        self._came_bytes += len(data)
        super().data_received(data)
        if self._in_head and self._came_bytes > self.bounds.max_header_bytes:
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
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self.scope["extensions"] = {WHOLE_BODY: {}}
        self._expect_nothing()
        self._in_body, self._came_bytes, self._head_bytes = False, 0, 0

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:
            self._expect_nothing()
            self._silence = self.loop.call_later(self.bounds.max_body_s, self.timeout_keep_alive_handler)

    def send_400_response(self, msg: str) -> None:
        """What httptools cannot read, or what was counted to be too much, as a problem."""
        most = self.bounds.max_header_bytes
        if max(self._head_bytes, self._came_bytes if self._in_head else 0) > most:
            self._refuse(HeadTooLarge(f"the request's head is larger than {most} bytes", where="headers"))
        else:
            self._refuse(MalformedRequest("this is no HTTP request"))

    def _count(self, length: int) -> None:
        self._head_bytes += length
        if self._head_bytes > self.bounds.max_header_bytes:
            raise ValueError("too large")  # httptools turns it into what ends in send_400_response

    def _is_idle(self) -> bool:
        """Nothing is under way, and uvicorn's own clock stopped at data that began no request."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self._in_body and self.timeout_keep_alive_task is None

    def _expect_head(self) -> None:
        self._silence = self.loop.call_later(self.bounds.max_header_s, self.timeout_keep_alive_handler)

    def _expect_nothing(self) -> None:
        if self._silence is not None:
            self._silence.cancel()
            self._silence = None

    def _refuse(self, error: TaskAppError) -> None:
        if not self.transport.is_closing():
            self.transport.write(_response(problem_of(error), error.retry_after_s))
            self.transport.close()


def _response(problem: Problem, retry_after_s: int | None) -> bytes:
    """A whole HTTP response: there is no request yet that an app could answer."""
    body = problem.model_dump_json(exclude_none=True).encode()
    lines = [
        f"HTTP/1.1 {problem.status} {problem.title}",
        f"content-type: {PROBLEM_MEDIA_TYPE}",
        f"content-length: {len(body)}",
        "connection: close",
    ]
    if retry_after_s is not None:
        lines.append(f"retry-after: {retry_after_s}")
    return "\r\n".join([*lines, "", ""]).encode("ascii") + body
