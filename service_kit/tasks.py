"""asyncio tasks that end with the code that started them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait for their ends; ignore their errors."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def racing(
    *work: Coroutine[Any, Any, Any] | asyncio.Future[Any],
) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Yield the tasks as soon as one is done; on exit, cancel the tasks that were made from coroutines."""
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await end_tasks(*(task for task, item in zip(tasks, work, strict=True) if task is not item))
