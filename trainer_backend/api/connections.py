"""uvicorn's HTTP connection, bounded in number, and in how long a request's head takes.

uvicorn begins its own clock after an answer: a connection that says nothing would stay for ever, and enough
of them leave no descriptor for the process of a job. The task app guards its own kind of connection so too
(task_app/guards/connections.py); the two services share no code.
"""

import asyncio
from http import HTTPStatus
from typing import Any, Literal

import h11
from starlette.responses import Response
from uvicorn.protocols.http.h11_impl import H11Protocol

from trainer_backend.api.errors import TooManyConnections
from trainer_backend.api.problems import problem_response
from trainer_backend.api.settings import Settings

_Due = Literal["head", "body"]


def bounded_protocol(settings: Settings) -> type[asyncio.Protocol]:
    """The class of connections of a server with these settings; uvicorn makes one object a connection."""

    class Connection(BoundedConnection):
        bounds = settings

    return Connection


class BoundedConnection(H11Protocol):
    """Closes a connection that does not say the whole of a request's head in `max_head_s`, and one that is
    answered and goes on with its body for `max_body_s`."""

    bounds: Settings

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._due: _Due | None = None
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        most = self.bounds.max_connections
        if len(self.connections) > most:
            told = f"{most} connections are open, the most that this service holds"
            transport.write(_bytes_of(problem_response(TooManyConnections(told))))
            transport.close()
        else:
            self._wait_for("head")

    def connection_lost(self, exc: Exception | None) -> None:
        self._wait_for(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if not self.transport.is_closing():
            super().data_received(data)
            self._wait_for(self._missing())

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._wait_for(self._missing())

    def _missing(self) -> _Due | None:
        """What is to come from the other side, while uvicorn waits for it without end."""
        quiet = self.timeout_keep_alive_task is not None and not self.conn.trailing_data[0]
        if self.transport.is_closing() or quiet:
            return None
        if self.conn.their_state is h11.IDLE:
            return "head"
        answered = self.cycle is not None and self.cycle.response_complete
        return "body" if answered and self.conn.their_state is h11.SEND_BODY else None

    def _wait_for(self, due: _Due | None) -> None:
        """From now on; where it is waited for already, its time goes on."""
        if due == self._due:
            return
        if self._clock is not None:
            self._clock.cancel()
        self._due, self._clock = due, None
        if due is not None:
            at_most_s = self.bounds.max_head_s if due == "head" else self.bounds.max_body_s
            self._clock = self.loop.call_later(at_most_s, self.transport.close)


def _bytes_of(response: Response) -> bytes:
    """As it goes over the wire: there is no request yet that the app could answer."""
    head = [f"HTTP/1.1 {response.status_code} {HTTPStatus(response.status_code).phrase}", "connection: close"]
    head += [f"{name}: {value}" for name, value in response.headers.items()]
    return "\r\n".join([*head, "", ""]).encode("latin-1") + bytes(response.body)
