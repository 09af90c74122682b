"""The supervisor's memory of running jobs, which a restart may lose, and its calls with a deadline."""

import asyncio
import math
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import ParamSpec, TypeVar

from trainer_backend.jobs.processes import JobProcess
from trainer_backend.jobs.states import Ending, is_crash
from trainer_backend.rundir.state import RunState
from trainer_backend.store.database import StoreUnavailable


@dataclass(slots=True)
class Figures:
    """Counts since the service started, for /metrics."""

    started: int = 0
    restarts: int = 0
    killed: int = 0
    store_failures: int = 0
    faults: int = 0


@dataclass(slots=True)
class Slot:
    """A place that a running job takes up, also between a crash and the next start. Times: the loop's clock.

    Attributes:
        counted: the next start is in the job's `attempt` already: it was claimed with it.
        ending: how its process ended, until that is written down.
        crashes: with no iteration in between; `iteration`: that was finished by the last of them.
    """

    process: JobProcess | None = None
    counted: bool = False
    ending: Ending | None = None
    not_before_s: float = 0.0
    held_until_s: float = math.inf
    crashes: int = 0
    iteration: int = 0

    @property
    def lives(self) -> bool:
        """Whether it has a process that has not ended."""
        return self.process is not None and self.process.exit_code is None

    def may_wait(self, now_s: float, held_s: float) -> bool:
        """Whether to wait, still, for who holds the run directory."""
        if math.isinf(self.held_until_s):
            self.held_until_s = now_s + held_s
        return now_s < self.held_until_s

    def ended(
        self, exit_code: int, state: RunState | None, said: str | None = None, code: str | None = None
    ) -> Ending:
        """How it ended; counted once, however often this is asked."""
        if self.ending is None:
            reached = state.iteration if state is not None else 0
            if reached > self.iteration:
                self.crashes, self.iteration = 0, reached
            self.crashes += is_crash(exit_code)
            self.ending = Ending(exit_code, state, self.crashes, said, code)
        return self.ending

    def wait_for_restart(self, until_s: float) -> None:
        """Note that the process is gone and that the next one starts at `until_s`."""
        self.process, self.ending, self.not_before_s = None, None, until_s


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

# A call of the store may take this long.
ANSWER_S = 20.0


class Line:
    """Runs calls that may hang, to a database or a network disk, one at a time, each with a deadline.

    A thread that hangs cannot be ended. So each caller has a Line with one thread of its own: its next call
    waits for the one that hangs, within the same deadline, and takes no thread from other callers.

    Args:
        name: of its thread.
        shown: the store, as an error may name it.
        answer_s: for each answer; while the previous call still runs, for both together.
    """

    def __init__(self, name: str, shown: str, answer_s: float) -> None:
        self.thread = ThreadPoolExecutor(1, name)
        self._shown, self._answer_s = shown, answer_s

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Return the call's result. A call that misses the deadline goes on, and its result is lost.

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
