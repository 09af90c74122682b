"""Calls that take milliseconds, each in a thread of its own: one that hangs holds up nobody else."""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from task_app.errors import CapacityReached

T = TypeVar("T")

log = structlog.get_logger("task_app")


class Threads:
    """Runs at most `most` calls at once, in order of asking.

    A pool would lose a worker to every call that never returns, and wait for it at exit. Here a call that
    runs longer than `stuck_after_s` gives its place to the next; its thread, a daemon, goes on.

    Args:
        most: calls at once, and stuck calls at once.
        stuck_after_s: from then on a call counts as stuck.
    """

    def __init__(self, *, most: int, stuck_after_s: float) -> None:
        self._most = most
        self._stuck_after_s = stuck_after_s
        self._places = asyncio.Semaphore(most)
        self._watchers: set[asyncio.Task[None]] = set()
        self.stuck = 0

    async def run(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """What `call(*arguments)` returns or raises. To cancel the wait does not stop the call."""
        if self.stuck >= self._most:
            raise CapacityReached(
                f"{self.stuck} calls of plug-ins hang in this task app; it starts no more of them",
                hint="its log names them; restart it",
            )
        await self._places.acquire()
        future = _started(what, call, *arguments)
        watcher = asyncio.get_running_loop().create_task(self._watch(what, future))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        return await asyncio.shield(future)

    async def _watch(self, what: str, future: asyncio.Future[T]) -> None:
        done, _ = await asyncio.wait({future}, timeout=self._stuck_after_s)
        self._places.release()
        if not done:
            log.error("plugin_hangs", what=what, after_s=self._stuck_after_s)
            self.stuck += 1
            await asyncio.wait({future})
            self.stuck -= 1
        future.exception()  # looked at, also when nobody waits for it any more


async def in_thread(threads: Threads | None, what: str, call: Callable[..., T], *arguments: Any) -> T:
    """In one of these threads; in one of the event loop's where there are none."""
    if threads is None:
        return await asyncio.to_thread(call, *arguments)
    return await threads.run(what, call, *arguments)


def _started(what: str, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def run() -> None:
        try:
            settle = partial(future.set_result, context.run(call, *arguments))
        except BaseException as exc:
            settle = partial(future.set_exception, exc)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle)

    threading.Thread(target=run, name=what, daemon=True).start()
    return future
