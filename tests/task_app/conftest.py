import asyncio
import gc
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from service_kit.logs import configure_logs
from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app


@pytest.fixture(autouse=True)
def service_logs():
    """The service's own log format: structlog's default one renders local variables, which takes seconds."""
    configure_logs("info")


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a task app with the counting environment."""
    async with running_app() as client:
        yield client


@pytest.fixture
async def real() -> AsyncIterator[httpx.AsyncClient]:
    """A client of a task app with the environments and policies that come with us."""
    async with running_app(default_plug_boards()) as client:
        yield client


class Live:
    """Objects that are still referenced, also by what only the garbage collector would find."""

    def count(self, kind: type) -> int:
        return sum(isinstance(one, kind) for one in gc.get_objects())

    async def until_gone(self, kind: type) -> None:
        """Wait until what ends in tasks and threads has ended."""
        async with asyncio.timeout(10):
            while self.count(kind):
                await asyncio.sleep(0)


@pytest.fixture
def live() -> Iterator[Live]:
    """Without the garbage collector."""
    gc.collect()
    gc.disable()
    yield Live()
    gc.enable()
