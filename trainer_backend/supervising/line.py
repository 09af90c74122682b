"""Questions that may hang, to a database or to a disk over the network: each with a deadline, one at a time.

A thread that hangs cannot be ended. So whoever asks has one of his own: what he asks for next waits for it,
no longer than for any other answer, so nothing piles up, and nobody else's threads are used up.
"""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ParamSpec, TypeVar

from trainer_backend.store.errors import StoreUnavailable

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# For the store to answer, whoever asks.
ANSWER_S = 20.0


class Line:
    """
    Args:
        name: of its thread.
        shown: the store, as an error may name it.
        answer_s: for each answer; where the one before is not there yet, for both.
    """

    def __init__(self, name: str, shown: str, answer_s: float) -> None:
        self.thread = ThreadPoolExecutor(1, name)
        self._shown, self._answer_s = shown, answer_s

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """What a call returns. One that is late goes on, and what it returns is lost.

        Raises:
            StoreUnavailable: it took too long.
        """
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._answer_s):
                return await loop.run_in_executor(self.thread, partial(call, *arguments, **named))
        except TimeoutError as error:
            raise late(self._shown, self._answer_s) from error


def late(shown: str, answer_s: float) -> StoreUnavailable:
    return StoreUnavailable(f"the store {shown} did not answer within {answer_s:g} s")


async def ended(threads: Iterable[ThreadPoolExecutor], *, at_most_s: float) -> None:
    """Wait until these work no longer, and take nothing on; so long at most."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        for one in threads:
            one.shutdown(cancel_futures=True)
        with suppress(RuntimeError):  # too late: the loop is closed
            loop.call_soon_threadsafe(over.set)

    # A daemon: neither the loop's end nor the interpreter's waits for it, as they do for a pool's thread.
    threading.Thread(target=wait, name="end-of-threads", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await over.wait()
