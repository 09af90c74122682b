"""`Slot`: what the supervisor remembers of a running job, in memory only. `Line`: calls with a deadline."""

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from trainer_backend.jobs.processes import JobProcess
from trainer_backend.jobs.states import Ending, is_stop
from trainer_backend.rundir.state import DONE, FAULTY, REFUSED
from trainer_backend.store.database import StoreUnavailable


@dataclass(slots=True)
class Slot:
    """What the supervisor remembers of a running or crashed job. Times are from the event loop's clock."""

    process: JobProcess | None = None
    is_counted: bool = False
    """Whether `attempt` in the job's row already counts the next start, because `jobs.claim` raised it."""
    ending: Ending | None = None
    """How the process ended, until the outcome is stored."""
    not_before_s: float = 0.0
    """After a crash: the earliest time of the next start."""
    lock_deadline_s: float | None = None
    """When to stop waiting for another trainer to release the run directory; None: the job does not wait."""
    crashes: int = 0
    """Crashes since the job last finished an iteration."""
    iteration: int = 0
    """The last iteration that was finished when the process last ended."""
    faults: int = 0
    """The number of `crashes` that were caused by an error in the job's data or in code."""

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    def record_end(self, ending: Ending) -> Ending:
        """Store and return how the process ended, with crash counts. Repeated calls count a crash once."""
        if self.ending is None:
            iteration = ending.state.iteration if ending.state is not None else 0
            if iteration > self.iteration:
                self.crashes, self.faults, self.iteration = 0, 0, iteration
            self.crashes += ending.exit_code not in (DONE, REFUSED) and not is_stop(ending.exit_code)
            self.faults += ending.exit_code == FAULTY
            self.ending = replace(ending, crashes=self.crashes, faults=self.faults)
        return self.ending


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Line:
    """Runs calls to the database or a network disk, which may hang, on its own thread with a deadline.

    A thread that hangs cannot be ended. Each component therefore has its own Line, so that a hanging call
    delays only later calls of the same component, and none of them beyond its own deadline.

    Args:
        shown: the store's address for messages.
        answer_s: seconds in which a call must return, including its wait for earlier calls on the thread.
        threads: more than one lets calls run at the same time, as for requests.
    """

    def __init__(self, name: str, shown: str, answer_s: float, *, threads: int = 1) -> None:
        self.thread = ThreadPoolExecutor(threads, name)
        self._shown, self._answer_s = shown, answer_s

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Run the call on the thread, and return its result.

        Raises:
            StoreUnavailable: the call missed the deadline. It continues, but its result is lost.
        """
        loop, logged = asyncio.get_running_loop(), copy_context()  # logs include the request's id
        try:
            async with asyncio.timeout(self._answer_s):
                return await loop.run_in_executor(
                    self.thread, partial(logged.run, partial(call, *arguments, **named))
                )
        except TimeoutError as error:
            raise StoreUnavailable(
                f"the store {self._shown} did not answer within {self._answer_s:g} s"
            ) from error


async def wait_for_threads(threads: Iterable[ThreadPoolExecutor], *, at_most_s: float) -> None:
    """Shut thread pools down, and wait at most `at_most_s` seconds until their threads have ended."""
    loop, over = asyncio.get_running_loop(), asyncio.Event()

    def wait() -> None:
        for thread in threads:
            thread.shutdown(cancel_futures=True)
        with suppress(RuntimeError):  # too late: the loop is closed
            loop.call_soon_threadsafe(over.set)

    # A daemon thread, since the loop and the interpreter would wait for a pool's thread at the end.
    threading.Thread(target=wait, name="end-of-threads", daemon=True).start()
    with suppress(TimeoutError):
        async with asyncio.timeout(at_most_s):
            await over.wait()
