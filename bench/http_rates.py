"""For bench/http_batch.py: a server in a process of its own, a light client, the server's rate and CPU time.

A benchmark with a slow client measures the client. This client takes 50 microseconds a request, httpx 1,000.
"""

import asyncio
import json
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Self

from bench.kit import ROOT, free_port

HOST = "127.0.0.1"

Play = Callable[[], Awaitable[int]]


@dataclass(frozen=True)
class Server:
    port: int
    pid: int
    key: str = ""

    def cpu_s(self) -> float:
        """Return the CPU seconds of the server's threads, in nanosecond resolution if the system has it."""
        spent_ns = 0
        for task in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            # A thread that made a world may end at any moment.
            with suppress(FileNotFoundError, ProcessLookupError):
                spent_ns += int(task.read_text().split()[0])
        return spent_ns / 1e9


class Connection:
    """One keep-alive connection to a server."""

    def __init__(self, server: Server) -> None:
        self._port = server.port
        self._head = f"Host: {HOST}:{server.port}\r\nX-API-Key: {server.key}\r\n"

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(HOST, self._port, limit=1 << 22)
        return self

    async def __aexit__(self, *error: object) -> None:
        self._writer.close()

    def encoded(self, path: str, body: Any) -> bytes:
        """Return a request as bytes, which can be sent often; a body of None makes it a GET."""
        if body is None:
            return f"GET {path} HTTP/1.1\r\n{self._head}\r\n".encode()
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """Send a request; return status and body of the reply."""
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


@dataclass(frozen=True)
class Rate:
    """The amount of work, the wall time and the CPU time of one measurement."""

    count: int
    wall_s: float
    cpu_s: float

    @property
    def per_s(self) -> float:
        return self.count / self.wall_s

    @property
    def cpu_us(self) -> float:
        return 1e6 * self.cpu_s / self.count


async def timed(server: Server, plays: Sequence[Play]) -> Rate:
    """Run all plays at once; return their total count, the wall time, and the server's CPU time."""
    cpu_s, wall_s = server.cpu_s(), time.perf_counter()
    counts = await asyncio.gather(*(play() for play in plays))
    return Rate(sum(counts), time.perf_counter() - wall_s, server.cpu_s() - cpu_s)


@asynccontextmanager
async def running(*command: str, key: str = "") -> AsyncIterator[Server]:
    """Run a server process on a free port, which is the last argument of its command.

    Its output is shown only if it ends before it listens: OpenEnv logs a traceback for every closed socket.
    """
    port = free_port()
    root = {"PYTHONPATH": str(ROOT), "TURNWISE_LOG_LEVEL": "warning", "ENVIRONMENT_API_KEY": key}
    with tempfile.TemporaryFile() as errors:
        process = await asyncio.create_subprocess_exec(
            *command, str(port), env={**os.environ, **root}, stdout=subprocess.DEVNULL, stderr=errors
        )
        try:
            while True:
                try:
                    _, writer = await asyncio.open_connection(HOST, port)
                    break
                except OSError:
                    if process.returncode is not None:
                        raise SystemExit(_ended(command, process.returncode, errors)) from None
                    await asyncio.sleep(0.1)
            writer.close()
            yield Server(port, process.pid, key)
        finally:
            with suppress(ProcessLookupError):  # it has ended by itself
                process.terminate()
            await process.wait()


def _ended(command: Sequence[str], code: int, errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    words = next((line for line in reversed(lines) if line.strip()), "it wrote no error")
    return f"{' '.join(command)} ended with exit code {code} before it listened: {words}"
