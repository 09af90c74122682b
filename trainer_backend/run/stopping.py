"""Stopping in order: Ctrl-C, SIGTERM and SIGHUP set an event, and every wait ends with that event too."""

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
    """Set once a stop is asked for."""

    by = ""
    """The name of the signal that asked for it; empty before."""


class Halted(Exception):
    """Raised inside work on a thread, between two of its steps, to end it; see `until_on_thread`."""


async def until(stop: asyncio.Event, work: Coroutine[None, None, Result]) -> Result | None:
    """The result of `work`, or None if `stop` came first; `work` is then cancelled and has ended."""
    async with racing(work, stop.wait()) as (task, _):
        return cast(Result, task.result()) if task.done() else None


async def while_unbroken(broken: asyncio.Future[str], work: Coroutine[Any, Any, Result]) -> Result:
    """The result of `work`, which has ended in any case.

    Raises:
        EngineStopped: an engine ended by itself first; `work` would wait for it forever.
    """
    async with racing(work, broken) as (task, _):
        if not task.done():
            raise EngineStopped(f"the engine does not run: {broken.result()}")
        return cast(Result, task.result())


async def until_on_thread(stop: asyncio.Event, tell: Tell, work: Callable[[Tell], Result]) -> Result | None:
    """The result of `work(tell)` on a thread, or None if `stop` came first; the thread has then ended.

    A thread cannot be cancelled: an abandoned one would keep working, and the interpreter would wait for it
    at exit. So `work` reports its progress between its steps, and that raises Halted once `stop` is set.
    """
    halt = threading.Event()

    def tell_unless_halted(done: int, total: int) -> None:
        if halt.is_set():
            raise Halted
        tell(done, total)

    async def pass_on() -> None:
        await stop.wait()
        halt.set()

    passing_on = asyncio.ensure_future(pass_on())
    try:
        return await asyncio.to_thread(work, tell_unless_halted)
    except Halted:
        return None
    finally:
        halt.set()  # also when it is this wait that is cancelled
        passing_on.cancel()


@contextmanager
def stop_on_signals(tell: Callable[[str], None], log: Callable[[str], None]) -> Iterator[Stop]:
    """An event that the first SIGINT, SIGTERM or SIGHUP sets; another one of the first two ends the process.

    That is at once: without waiting for a step on a thread and without saving. Files are written aside and
    renamed, and an embedded task app ends when its standard input closes.

    A terminal that closes sends SIGHUP, often twice: by the kernel and by its shell. So a second one is no
    second request, also after the context. Where SIGHUP is ignored at the start, by `nohup`, it stays so.

    Args:
        tell: is given a line for the person who sent the first signal, on the event loop, when it comes. The
            stop itself may take the minutes of an update.
        log: is given the last line of a process that ends at once. It must not wait, as a terminal may.
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
            sys.stdout.write(_SHOW_CURSOR)  # a live table hides it, and will not be there to show it again
            sys.stdout.flush()
    finally:  # also where the terminal is gone
        os._exit(128 + number)
