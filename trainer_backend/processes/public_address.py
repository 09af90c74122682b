"""The public address of a gateway, which stays the same for the whole run, wherever the gateway runs.

Allow-lists of task apps, firewalls and running rollouts contain this address, so it must not change.
"""

import asyncio
from contextlib import suppress
from functools import partial
from urllib.parse import urlsplit

from service_kit.server import BACKLOG, Listener

_CHUNK_BYTES, _CONNECT_S = 1 << 16, 10.0


class PublicAddress:
    """The socket at a gateway's public address, which the orchestrator holds.

    A gateway process on the same machine inherits the socket. If the process is on another machine, the
    orchestrator forwards the connections. While no process serves, connections wait in the socket's backlog.
    """

    def __init__(self, listener: Listener) -> None:
        self.url, self.socket = listener.url, listener.socket
        self._server: asyncio.Server | None = None
        self._connections: set[asyncio.Task[None]] = set()

    async def lead_to(self, url: str) -> None:
        """Forward connections to the process at `url`."""
        self.hold()
        parts = urlsplit(url)
        accept = partial(self._pass_on, parts.hostname or "", parts.port or 0)
        self._server = await asyncio.start_server(accept, sock=self.socket.dup(), backlog=BACKLOG)

    def hold(self) -> None:
        """Let new connections wait in the socket's backlog, and close the forwarded connections."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in self._connections:
            connection.cancel()

    async def _pass_on(
        self, host: str, port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        with suppress(OSError, asyncio.CancelledError):  # a TimeoutError is an OSError
            try:
                async with asyncio.timeout(_CONNECT_S):
                    far_reader, far_writer = await asyncio.open_connection(host, port)
                try:
                    async with asyncio.TaskGroup() as ways:
                        there = ways.create_task(_copy(reader, far_writer))
                        back = ways.create_task(_copy(far_reader, writer))
                        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
                        there.cancel()
                        back.cancel()
                finally:
                    far_writer.close()
            finally:
                self._connections.discard(task)
                writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(_CHUNK_BYTES):
            writer.write(data)
            await writer.drain()
