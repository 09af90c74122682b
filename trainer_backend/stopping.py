"""Stopping in order: Ctrl-C and SIGTERM set an event, and whoever waits, waits for that event too."""

import asyncio
import signal
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import TypeVar

Result = TypeVar("Result")


async def until(stop: asyncio.Event, work: Coroutine[None, None, Result]) -> Result | None:
    """The result of `work`, or None if `stop` came first; `work` is then cancelled and has ended."""
    task: asyncio.Task[Result] = asyncio.ensure_future(work)
    waiter = asyncio.ensure_future(stop.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        return task.result() if task.done() else None
    finally:
        for item in (task, waiter):
            item.cancel()
        await asyncio.gather(task, waiter, return_exceptions=True)


@contextmanager
def stop_on_signals() -> Iterator[asyncio.Event]:
    """An event that the first SIGINT or SIGTERM sets; a second one interrupts at once."""
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    signals = (signal.SIGINT, signal.SIGTERM)

    def heard() -> None:
        stop.set()
        for number in signals:
            loop.remove_signal_handler(number)

    for number in signals:
        loop.add_signal_handler(number, heard)
    try:
        yield stop
    finally:
        for number in signals:
            loop.remove_signal_handler(number)
