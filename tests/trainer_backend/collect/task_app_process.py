"""A real task app in a process of its own, that a test may kill and start again on the same port."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.conftest import TASK_APP_KEY

_READY = "listening on "


class TaskAppProcess:
    """Use `started`; `url` and `port` stay over a restart."""

    def __init__(self, log_file: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.log_file, self.host, self.port = log_file, host, port
        self._process: asyncio.subprocess.Process | None = None

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        with self.log_file.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "task_app", "--host", self.host, "--port", str(self.port),
                "--exit-with-parent",
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=log,
                env={**os.environ, "ENVIRONMENT_API_KEY": TASK_APP_KEY.get_secret_value()},
            )  # fmt: skip
        line = (await self._process.stdout.readline()).decode().strip()
        assert line.startswith(_READY), self.log_file.read_text()
        self.port = int(line.rpartition(":")[2])

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def gone(self) -> None:
        await self._process.wait()

    async def end(self) -> None:
        if self._process.returncode is None:
            self._process.kill()
        await self._process.wait()


@asynccontextmanager
async def started(*task_apps: TaskAppProcess) -> AsyncIterator[None]:
    await asyncio.gather(*(task_app.start() for task_app in task_apps))
    try:
        yield
    finally:
        await asyncio.gather(*(task_app.end() for task_app in task_apps))
