"""A port here that leads to a process elsewhere, which may be another one at another place later."""

import asyncio
import socket
from contextlib import suppress
from typing import Self
from urllib.parse import urlsplit

from service_kit.server import BACKLOG

_CHUNK_BYTES = 1 << 16
# How long a connection waits while the port leads nowhere, and for the process that it leads to. A client
# that has gone is not noticed before.
WAIT_S, _CONNECT_S = 600.0, 10.0


class PortForward:
    """Passes each connection of a port on to where it leads now. Whoever has the port's address keeps it.

    Connections wait while it leads nowhere, as they do at the socket of a child that is started again: no
    more than that socket would hold, and none for longer than `wait_s`.
    """

    def __init__(self, held: socket.socket, wait_s: float) -> None:
        self._socket, self._wait_s = held, wait_s
        self._server: asyncio.Server | None = None
        self._target: tuple[str, int] | None = None
        self._leads = asyncio.Event()
        self._waiting: set[asyncio.Task[None]] = set()
        self._connections: set[asyncio.Task[None]] = set()

    @classmethod
    async def opened(cls, held: socket.socket, wait_s: float = WAIT_S) -> Self:
        """Accept connections at a socket, which stays open for its holder to close."""
        forward = cls(held, wait_s)
        forward._server = await asyncio.start_server(forward._pass_on, sock=held.dup(), backlog=BACKLOG)
        return forward

    def lead_to(self, url: str | None) -> None:
        """Pass new connections on to this address; None: have them wait. Those of before are cut."""
        if url is None:
            self._leads.clear()
        else:
            parts = urlsplit(url)
            assert parts.hostname and parts.port, "a process tells its host and port"
            self._target = (parts.hostname, parts.port)
            self._leads.set()
        for connection in self._connections:
            connection.cancel()

    async def close(self) -> None:
        """Accept nothing more, and cut what is open."""
        self.lead_to(None)
        if self._server is not None:
            self._server.close()
        for task in self._waiting:
            task.cancel()
        await asyncio.gather(*self._connections, *self._waiting, return_exceptions=True)

    async def _pass_on(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        if len(self._waiting) >= BACKLOG:
            writer.close()
            return
        self._waiting.add(task)
        with suppress(OSError, asyncio.CancelledError):  # a TimeoutError is an OSError
            try:
                async with asyncio.timeout(self._wait_s):
                    await self._leads.wait()
                self._waiting.discard(task)
                self._connections.add(task)
                assert self._target is not None
                async with asyncio.timeout(_CONNECT_S):
                    far = await asyncio.open_connection(*self._target)
                await _join(reader, writer, *far)
            finally:
                self._waiting.discard(task)
                self._connections.discard(task)
                writer.close()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    far_reader: asyncio.StreamReader,
    far_writer: asyncio.StreamWriter,
) -> None:
    """Pass bytes both ways until one side ends."""
    ways = [
        asyncio.ensure_future(_copy(reader, far_writer)),
        asyncio.ensure_future(_copy(far_reader, writer)),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        await asyncio.gather(*ways, return_exceptions=True)
        far_writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(_CHUNK_BYTES):
        writer.write(data)
        await writer.drain()
