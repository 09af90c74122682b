"""A server in a process of its own, and how fast and at what cost of CPU it answers (bench/http_batch.py)."""

import asyncio
import os
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from bench.kit import ROOT, free_port

HOST = "127.0.0.1"

Play = Callable[[], Awaitable[int]]


@dataclass(frozen=True)
class Server:
    port: int
    pid: int
    key: str = ""

    def cpu_s(self) -> float:
        """CPU seconds of all its threads, in nanosecond resolution where the system has it."""
        spent_ns = 0
        for task in Path(f"/proc/{self.pid}/task").glob("*/schedstat"):
            # A thread that made a world may end at any moment.
            with suppress(FileNotFoundError, ProcessLookupError):
                spent_ns += int(task.read_text().split()[0])
        return spent_ns / 1e9


@dataclass(frozen=True)
class Rate:
    """The work done in one window of time."""

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
    """Run all at once, and add up their counts."""
    cpu_s, wall_s = server.cpu_s(), time.perf_counter()
    counts = await asyncio.gather(*(play() for play in plays))
    return Rate(sum(counts), time.perf_counter() - wall_s, server.cpu_s() - cpu_s)


@asynccontextmanager
async def running(*command: str, key: str = "") -> AsyncIterator[Server]:
    """Run a server process on a free port, which is the last argument of its command.

    What it writes is shown only if it ends before it listens: OpenEnv logs a traceback for every socket that
    is closed.
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
