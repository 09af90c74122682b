"""Functions that end asyncio tasks together with the code that started them."""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any


async def end_tasks(*tasks: asyncio.Future[Any]) -> None:
    """Cancel the tasks and wait until all of them have ended; ignore their exceptions."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


@asynccontextmanager
async def racing(
    *work: Coroutine[Any, Any, Any] | asyncio.Future[Any],
) -> AsyncIterator[list[asyncio.Future[Any]]]:
    """Run all `work` concurrently, and yield its tasks, in the given order, as soon as one of them is done.

    On exit, cancel the tasks that this function created from coroutines. Tasks and futures that the caller
    passed in are not cancelled.
    """
    tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(item) for item in work]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        yield tasks
    finally:
        await end_tasks(*(task for task, item in zip(tasks, work, strict=True) if task is not item))
