"""A real task app in a process of its own, that a test may kill and start again on the same port."""

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from service_kit.process import PIPE, Child
from tests.conftest import TASK_APP_KEY


class TaskAppProcess:
    """Use `started`; `url` and `port` stay over a restart."""

    child: Child

    def __init__(self, log_file: Path, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.log_file, self.host, self.port = log_file, host, port

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.port}"

    async def start(self) -> None:
        listens = ("--host", self.host, "--port", str(self.port), "--exit-with-parent")
        with self.log_file.open("ab") as log:
            self.child = await Child.start(
                (sys.executable, "-m", "task_app", *listens), stdout=PIPE, stderr=log,
                env={**os.environ, "ENVIRONMENT_API_KEY": TASK_APP_KEY.get_secret_value()},
            )  # fmt: skip
        url = await self.child.address()
        assert url is not None, self.log_file.read_text()
        self.port = int(url.rpartition(":")[2])


@asynccontextmanager
async def started(*task_apps: TaskAppProcess) -> AsyncIterator[None]:
    await asyncio.gather(*(task_app.start() for task_app in task_apps))
    try:
        yield
    finally:
        await asyncio.gather(*(task_app.child.end_all() for task_app in task_apps))
