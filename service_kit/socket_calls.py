"""Calls of a table (`service_kit/rpc.py`) over a socket, which carries many calls at the same time.

    caller -> server      3 call update [...]      3 stop
    server -> caller      3 progress [3, 10]       3 result [...]      3 error {...}

A line is the call's number and the line of a call over HTTP. A call over HTTP takes seven times as long, too
long for a call per sample of an engine.
"""

import asyncio
import socket
from collections.abc import Callable
from itertools import count
from typing import Any, cast

import structlog

from service_kit.boundary import describe_error
from service_kit.errors import ServiceError
from service_kit.replies import Lines
from service_kit.rpc import Reply, Table, Tell, carry_out

log = structlog.get_logger("calls")

_MOST_UNSENT_BYTES = 64 << 20
# Longest number, verb and name of a call, before its arguments.
_MOST_HEAD_BYTES = 200
_MOST_DIGITS, _SHOWN = 18, 60


class Unanswered(ConnectionError):
    """The other end of a socket is closed or sends invalid lines; callers put the text after a colon."""


class _Connection(asyncio.Protocol):
    """Sends and receives lines over a socket; calls `lost` once, with the reason of the end."""

    def __init__(
        self, most_bytes: int, hear: Callable[[bytes], None], lost: Callable[[str], None], who: str
    ) -> None:
        self._lines, self._hear, self._lost, self._who = Lines(most_bytes), hear, lost, who
        self._transport: asyncio.Transport | None = None
        self._reason = f"{who} has ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.take(data):
                self._hear(line)
        except Exception as error:  # the bytes come from another process: any error may follow
            log.error("connection_misheard", exc_info=error)
            self.abort(f"what {self._who} said could not be read: {describe_error(error)}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self._reason)

    def say(self, line: bytes) -> None:
        """Send a line, or do nothing if the other end has closed, which `lost` reports."""
        assert self._transport is not None
        if self._transport.is_closing():
            return
        self._transport.write(line + b"\n")
        if self._transport.get_write_buffer_size() > _MOST_UNSENT_BYTES:
            self.abort(f"{self._who} does not read what it is told")

    def abort(self, reason: str) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._reason = reason
            self._transport.abort()


class Caller:
    """Makes calls over a socket in one event loop. `who` names the other end in errors."""

    def __init__(self, table: Table[Any], who: str = "its process") -> None:
        self._table, self._who = table, who
        self._numbers = count(1)
        self._open: dict[int, tuple[Reply, asyncio.Future[None]]] = {}
        self._gone: str | None = f"{who} was not started"
        self._connection: _Connection | None = None

    async def connect(self, connected: socket.socket) -> None:
        connection = _Connection(self._table.most_reply_bytes, self._hear, self.close, self._who)
        await asyncio.get_running_loop().create_connection(lambda: connection, sock=connected)
        self._connection, self._gone = connection, None

    async def call(self, name: str, *arguments: Any, tell: Tell | None = None) -> Any:
        """Make a call and return its result. A cancellation or an error of `tell` stops the call.

        Raises:
            Unanswered: the other end is closed.
            ServiceError: the error of the call itself.
        """
        if self._gone is not None:
            raise Unanswered(self._gone)
        assert self._connection is not None
        number, body = next(self._numbers), self._table.write_arguments(name, arguments)
        reply = Reply(self._table, name, body, tell)
        end = asyncio.get_running_loop().create_future()
        self._open[number] = reply, end
        try:
            self._connection.say(b"%d call %s " % (number, name.encode()) + body)
            await end
        finally:
            del self._open[number]
            if not end.done() or end.cancelled() or reply.unwelcome is not None:
                self._connection.say(b"%d stop" % number)
        return reply.result()

    def close(self, reason: str = "it was stopped") -> None:
        """Close the connection; waiting calls raise Unanswered."""
        self._gone = self._gone or reason
        if self._connection is not None:
            self._connection.abort(reason)
        for _, end in self._open.values():
            if not end.done():
                end.set_exception(Unanswered(self._gone))

    def _hear(self, line: bytes) -> None:
        number, _, rest = line.partition(b" ")
        reply, end = self._open.get(_number(number), (None, None))
        if reply is None or end is None or end.done():
            return  # the call is no longer waiting
        try:
            if reply.hear(rest) or reply.unwelcome is not None:
                end.set_result(None)
        except ServiceError as error:
            end.set_exception(error)


async def serve_calls(table: Table[Any], host: object, connected: socket.socket) -> str:
    """Answer the calls of a socket until its other end closes; return the reason of the end."""
    loop = asyncio.get_running_loop()
    gone: asyncio.Future[str] = loop.create_future()

    def lose(reason: str) -> None:
        if not gone.done():
            gone.set_result(reason)

    tasks: dict[int, asyncio.Task[None]] = {}

    def hear(line: bytes) -> None:
        start, _, rest = line.partition(b" ")
        verb, _, rest = rest.partition(b" ")
        number = _number(start)
        if verb == b"stop":
            if number in tasks:
                tasks[number].cancel()
            return
        word, _, body = rest.partition(b" ")
        name = word.decode()
        if verb != b"call" or number in tasks or name not in table:
            raise ValueError(f"no call: {line[:_SHOWN]!r}")

        def say(text: bytes) -> None:
            connection.say(start + b" " + text)

        tasks[number] = asyncio.ensure_future(carry_out(table, host, name, body, say))
        tasks[number].add_done_callback(lambda task: tasks.pop(number, None))

    connection = _Connection(table.most_argument_bytes + _MOST_HEAD_BYTES, hear, lose, "its caller")
    await loop.create_connection(lambda: connection, sock=connected)
    try:
        return await gone
    finally:
        for task in list(tasks.values()):
            task.cancel()
        await asyncio.gather(*tasks.values(), return_exceptions=True)
        connection.abort("it was stopped")


def _number(text: bytes) -> int:
    if not text.isdigit() or len(text) > _MOST_DIGITS:
        raise ValueError(f"no number of a call: {text[:_SHOWN]!r}")
    return int(text)
