"""Graceful stops: Ctrl-C, SIGTERM and SIGHUP set an event, and functions end other work when it is set."""

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar, cast

from service_kit.tasks import racing
from trainer_backend.errors import EngineStopped

Result = TypeVar("Result")
Tell = Callable[[int, int], None]

STOPPING = "stopping, and saving what is finished; Ctrl-C again ends at once, without saving"
# Signals that ask for a stop, as users know them.
_NAMES = {signal.SIGINT: "Ctrl-C", signal.SIGTERM: "SIGTERM", signal.SIGHUP: "SIGHUP"}
_SHOW_CURSOR = "\x1b[?25h"


class Stop(asyncio.Event):
    by = ""
    """The name of the signal that requested the stop; empty until then."""


class Halted(Exception):
    """Raised by a progress report to end work on a thread between two steps; see `until_on_thread`."""


async def until(stop: asyncio.Event, work: Coroutine[None, None, Result]) -> Result | None:
    """Return the result of `work`; if `stop` comes first, cancel `work`, await its end and return None."""
    async with racing(work, stop.wait()) as (task, _):
        return cast(Result, task.result()) if task.done() else None


async def while_unbroken(broken: asyncio.Future[str], work: Coroutine[Any, Any, Result]) -> Result:
    """Return the result of `work`. If `broken` is set first, cancel `work` and await its end.

    Raises:
        EngineStopped: `broken` was set, because an engine failed; `work` would wait for this engine forever.
    """
    async with racing(work, broken) as (task, _):
        if not task.done():
            raise EngineStopped(f"the engine does not run: {broken.result()}")
        return cast(Result, task.result())


async def until_on_thread(stop: asyncio.Event, tell: Tell, work: Callable[[Tell], Result]) -> Result | None:
    """Run `work(tell)` on a thread and return its result; return None if `stop` ended the work early.

    A thread cannot be cancelled, and the interpreter would wait for it at exit. So `work` must report
    progress between its steps. Once `stop` is set, the next report raises Halted, which ends the thread.
    """
    is_abandoned = threading.Event()

    def tell_unless_halted(done: int, total: int) -> None:
        if stop.is_set() or is_abandoned.is_set():
            raise Halted
        tell(done, total)

    try:
        return await asyncio.to_thread(work, tell_unless_halted)
    except Halted:
        return None
    finally:
        is_abandoned.set()  # so that the thread ends too if this wait was cancelled


@contextmanager
def stop_on_signals(tell: Callable[[str], None], log: Callable[[str], None]) -> Iterator[Stop]:
    """Yield an event that the first SIGINT, SIGTERM or SIGHUP sets; a second one ends the process.

    The second signal does not wait for threads and saves nothing. Files stay whole, because each is written
    under a temporary name and renamed. An embedded task app ends when its standard input closes.

    A closing terminal often sends SIGHUP twice, from the kernel and from the shell. So a second SIGHUP is
    ignored, even after the context. If SIGHUP was ignored before, as under `nohup`, it stays ignored.

    Args:
        tell: receives a line for the user at the first signal, since the stop may take minutes. Called on the
            event loop.
        log: receives the last line of a process that ends at once. It must not block, as a terminal may.
    """
    loop = asyncio.get_running_loop()
    stop = Stop()
    numbers = set(_NAMES)
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
        numbers.remove(signal.SIGHUP)

    def heard(number: signal.Signals) -> None:
        if not stop.is_set():
            stop.by = _NAMES[number]
            stop.set()
            tell(STOPPING)
        elif number != signal.SIGHUP:
            log(f"ended at once by {_NAMES[number]}, the second request to stop: nothing more is saved")
            _end_at_once(number)

    for number in numbers:
        loop.add_signal_handler(number, partial(heard, number))
    try:
        yield stop
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
        if stop.by == _NAMES[signal.SIGHUP]:
            signal.signal(signal.SIGHUP, signal.SIG_IGN)


def _end_at_once(number: int) -> None:
    # An exception would still wait for every thread of the pool, and an update can take minutes.
    try:
        if sys.stdout.isatty():
            sys.stdout.write(_SHOW_CURSOR)  # a live table hid it, and will not show it again
            sys.stdout.flush()
    finally:  # also where the terminal is gone
        os._exit(128 + number)
