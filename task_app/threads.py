"""Runs each slow call of a plug-in in a thread of its own, so that a call that hangs blocks no other."""

import asyncio
import contextvars
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import structlog

from service_kit.boundary import describe_error
from service_kit.errors import InternalError, ServiceError
from task_app.errors import CapacityReached, boundary

T = TypeVar("T")

log = structlog.get_logger("task_app")

_SOON_S = 1.0


class Threads:
    """Runs calls of plug-ins in threads, up to `most` at once. Further calls wait; the oldest starts first.

    A call stops counting towards `most` if it runs longer than `stuck_after_s` seconds, or about a second
    after its caller was cancelled. Its daemon thread continues, and the call counts as hanging until it ends.
    Once `most` calls hang, `run` raises CapacityReached. A thread pool would lose a worker to every call that
    hangs, and would wait for the call when the process exits.
    """

    def __init__(self, *, most: int, stuck_after_s: float) -> None:
        self._most = most
        self._stuck_after_s = stuck_after_s
        self._places = asyncio.Semaphore(most)
        self._watchers: set[asyncio.Task[None]] = set()
        self.stuck_count = 0

    async def run(self, what: str, call: Callable[..., T], *arguments: Any) -> T:
        """Run `call(*arguments)` in a thread and return its result. Cancellation does not stop the call.

        `what` names the call in errors and logs.

        Raises:
            CapacityReached: too many calls hang.
            CriticalError: the call raised an exception that is not a ServiceError.
        """
        if self.stuck_count >= self._most:
            raise CapacityReached(
                f"{self.stuck_count} calls of plug-ins hang in this task app; it starts no more of them",
                hint="its log names them; restart it",
            )
        await self._places.acquire()
        loop = asyncio.get_running_loop()
        future = begin(what, call, *arguments)
        given_up: asyncio.Future[None] = loop.create_future()
        watcher = loop.create_task(self._watch_call(what, future, given_up))
        self._watchers.add(watcher)
        watcher.add_done_callback(self._watchers.discard)
        try:
            return await asyncio.shield(future)
        finally:
            given_up.set_result(None)

    async def _watch_call(self, what: str, future: asyncio.Future[T], given_up: asyncio.Future[None]) -> None:
        begun, stuck_after_s = time.monotonic(), self._stuck_after_s
        either: set[asyncio.Future[Any]] = {future, given_up}
        await asyncio.wait(either, timeout=stuck_after_s, return_when=asyncio.FIRST_COMPLETED)
        # Most calls end soon after their caller has given up.
        await asyncio.wait({future}, timeout=min(_SOON_S, stuck_after_s))
        self._places.release()
        if not future.done():
            log.error("plugin_hangs", what=what, after_s=round(time.monotonic() - begun, 1))
            self.stuck_count += 1
            await asyncio.wait({future})
            self.stuck_count -= 1
        future.exception()  # otherwise asyncio logs an exception that no caller retrieved


async def in_thread(threads: Threads | None, what: str, call: Callable[..., T], *arguments: Any) -> T:
    """Run the call of a plug-in in a thread and return its result; no limit of threads if `threads` is None.

    Raises:
        CapacityReached: too many calls of `threads` hang.
        CriticalError: the call raised an exception that is not a ServiceError.
    """
    if threads is None:
        return await begin(what, call, *arguments)
    return await threads.run(what, call, *arguments)


def begin(what: str, call: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Start the call in a new daemon thread, and return a future of its result or its CriticalError."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = contextvars.copy_context()

    def guarded() -> T:
        # The boundary is inside the thread, because a future does not accept a StopIteration. A SystemExit in
        # the future would end the service, and a CancelledError would look like our own cancellation.
        with boundary(what):
            return call(*arguments)

    def run(future: asyncio.Future[T]) -> None:
        try:
            settle = partial(future.set_result, context.run(guarded))
        except ServiceError as exc:
            settle = partial(future.set_exception, exc)
        except BaseException as exc:  # the boundary failed; without a result, the caller would wait for ever
            settle = partial(future.set_exception, InternalError(f"{what}: {describe_error(exc)}"))
        with suppress(RuntimeError):  # the loop may be closed by now
            loop.call_soon_threadsafe(settle)
        del future, settle  # otherwise the traceback of an error would keep the error and the plug-in alive

    threading.Thread(target=run, args=(future,), name=what, daemon=True).start()
    return future
