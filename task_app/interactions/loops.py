"""Where the calls of an interaction run: on the service's event loop, or on one of a thread of its own."""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Loop(Protocol):
    """An event loop that coroutines are sent to."""

    def submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Begin it there; the future belongs to the caller's loop, and to cancel it cancels the work."""

    def stop(self) -> None:
        """Nothing more will be sent."""


class ServiceLoop:
    """The caller's own loop: no switch of threads, and nothing to clean up."""

    def submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        return asyncio.get_running_loop().create_task(work)

    def stop(self) -> None:
        """The service goes on."""


class OwnLoop:
    """A loop in a daemon thread, which ends when it is stopped, or with the process.

    It is one loop from start to finalise, since what a class opens in one call (a client session, a lock, a
    task) is bound to the loop that it was opened on.
    """

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            self._loop.run_until_complete(_end_of(asyncio.all_tasks(self._loop)))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            self._loop.close()


async def _end_of(tasks: set[asyncio.Task[Any]]) -> None:
    """What a class left running: told to end, and given a moment."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks, timeout=1.0)
