import asyncio
import gc
from collections.abc import Iterator

import pytest

from service_kit.logs import configure_logs


@pytest.fixture(autouse=True)
def service_logs():
    """The service's own log format: structlog's default one renders local variables, which takes seconds."""
    configure_logs("info")


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
