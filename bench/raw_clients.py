"""HTTP and WebSocket clients on bare asyncio streams: 50 microseconds a request, where httpx takes 1,000.

A benchmark that is driven by a heavy client measures the client. They speak just enough of either protocol.
"""

import asyncio
import base64
import json
import os
import struct
from typing import Any


class _Connection:
    def __init__(self, host: str, port: int) -> None:
        self._address = (host, port)

    async def __aenter__(self) -> Any:
        self._reader, self._writer = await asyncio.open_connection(*self._address, limit=1 << 22)
        await self._opened()
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    async def _opened(self) -> None:
        """Nothing to say before the first message."""


class HttpConnection(_Connection):
    """One keep-alive connection."""

    def __init__(self, host: str, port: int, *, key: str = "") -> None:
        super().__init__(host, port)
        self._head = f"Host: {host}:{port}\r\nX-API-Key: {key}\r\n"

    def encoded(self, path: str, body: Any) -> bytes:
        """A request as bytes, to be sent often. A body of None makes it a GET."""
        if body is None:
            return f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Status and body of the reply."""
        self._writer.write(request)
        head = await self._reader.readuntil(b"\r\n\r\n")
        lower = head.lower()
        start = lower.index(b"content-length:") + 15
        length = int(lower[start : lower.index(b"\r", start)])
        return int(head[9:12]), await self._reader.readexactly(length)

    async def post(self, path: str, body: Any) -> Any:
        status, reply = await self.send(self.encoded(path, body))
        assert status < 400, reply
        return json.loads(reply)


class WebSocketConnection(_Connection):
    """One WebSocket; text frames of JSON."""

    def __init__(self, host: str, port: int, *, path: str) -> None:
        super().__init__(host, port)
        self._path = path

    async def _opened(self) -> None:
        key = base64.b64encode(os.urandom(16)).decode()
        self._writer.write(
            f"GET {self._path} HTTP/1.1\r\nHost: {self._address[0]}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        head = await self._reader.readuntil(b"\r\n\r\n")
        assert b" 101 " in head, head

    @staticmethod
    def encoded(message: Any) -> bytes:
        """A text frame. Clients must mask; a mask of zeros is one, and leaves the text as it is."""
        data = json.dumps(message).encode()
        size = struct.pack("!BB", 0x81, 0x80 | len(data)) if len(data) < 126 else b""
        size = size or struct.pack("!BBH", 0x81, 0x80 | 126, len(data))
        return size + b"\0\0\0\0" + data

    async def send(self, frame: bytes) -> bytes:
        """The next text frame that comes back."""
        self._writer.write(frame)
        while True:
            first, second = await self._reader.readexactly(2)
            length = second & 0x7F
            if length == 126:
                (length,) = struct.unpack("!H", await self._reader.readexactly(2))
            elif length == 127:
                (length,) = struct.unpack("!Q", await self._reader.readexactly(8))
            data = await self._reader.readexactly(length)
            if first & 0x0F == 1:
                return data

    async def last(self, frame: bytes) -> None:
        """Send, and wait until the other side has closed."""
        self._writer.write(frame)
        await self._reader.read()
