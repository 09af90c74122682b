"""Remote procedure calls over a socket; many calls can be in progress on one socket at the same time.

`service_kit/rpc.py` defines the calls and the lines of their replies. On the socket, the lines are

    caller -> server      3 call update [...]      3 stop
    server -> caller      3 progress [3, 10]       3 result [...]      3 error {...}

Each line begins with the number of its call, which the caller chooses. `stop` cancels the call. The rest of a
line from the server is the same as in a reply over HTTP. Inference engines use a socket, because each sample
is one call, and a call over HTTP takes seven times as long.
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
# Largest size of the part of a line before the arguments: the call's number, the word `call` and its name.
_MOST_HEAD_BYTES = 200
_MOST_DIGITS, _SHOWN = 18, 60


class Unanswered(ConnectionError):
    """The call gets no answer, because the other end of the socket was closed or sent invalid lines.

    The text is a clause without a capital, so that callers can append it to a message after a colon.
    """


class _Connection(asyncio.Protocol):
    """Sends and receives lines over a socket.

    Args:
        most_bytes: size limit of a received line.
        hear: called with each received line.
        lost: called once with the reason when the connection has ended.
        who: names the other end in error messages.
    """

    def __init__(
        self, most_bytes: int, hear: Callable[[bytes], None], lost: Callable[[str], None], who: str
    ) -> None:
        self._lines, self._hear, self._lost, self._who = Lines(most_bytes), hear, lost, who
        self._transport: asyncio.Transport | None = None
        self._reason = f"{who} has ended"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass of it

    def data_received(self, data: bytes) -> None:
        try:
            for line in self._lines.take(data):
                self._hear(line)
        except Exception as error:  # bytes from another process may raise any exception
            log.error("connection_misheard", exc_info=error)
            self.abort(f"what {self._who} said could not be read: {describe_error(error)}")

    def connection_lost(self, exc: Exception | None) -> None:
        self._lost(self._reason)

    def say(self, line: bytes) -> None:
        """Send a line. If the connection has ended, do nothing: `lost` reports the end."""
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
    """Makes calls of `table` over a socket; all calls must come from one event loop.

    `who` names the other end of the socket in error messages.
    """

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
        """Make a call and return its result.

        `tell` is called with the values of each progress report. If `tell` raises, or if this coroutine is
        cancelled, the call is stopped at the other end too.

        Raises:
            Unanswered: the connection is closed, or was closed before the reply was complete.
            ServiceError: the call itself raised this error, or its reply does not fit its type.
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
        """Close the connection; calls that wait for their replies raise Unanswered with this reason."""
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
            return  # this call no longer waits for a reply, for example because it was cancelled
        try:
            if reply.hear(rest) or reply.unwelcome is not None:
                end.set_result(None)
        except ServiceError as error:
            end.set_exception(error)


async def serve_calls(table: Table[Any], host: object, connected: socket.socket) -> str:
    """Answer the calls that arrive on a socket until the connection ends, and return the reason why it ended.

    Args:
        table: declares the calls.
        host: object whose methods execute the calls, as in `rpc.carry_out`.
        connected: the socket.
    """
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
