"""The supervisor's memory of running jobs, which a restart may lose, and calls with a deadline."""

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
    """The known facts of a running job, also between a crash and the next start. Times are the loop's."""

    process: JobProcess | None = None
    is_counted: bool = False
    """Whether the job's `attempt` already counts the next start; claiming a job counts its first start."""
    ending: Ending | None = None
    """The end of its process, until it is stored."""
    not_before_s: float = 0.0
    """When the next process starts, after a crash."""
    lock_deadline_s: float | None = None
    """The deadline for another trainer to release the run directory; None: not waiting."""
    crashes: int = 0
    """Crashes without an iteration in between."""
    iteration: int = 0
    """The last finished iteration at the last crash."""
    faults: int = 0
    """Crashes since that iteration whose cause is the job's data or code."""

    @property
    def lives(self) -> bool:
        return self.process is not None and self.process.exit_code is None

    def record_end(self, ending: Ending) -> Ending:
        """Record the end of the process, with the crashes so far; repeated calls count a crash once."""
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
    """Runs calls that may hang in a database or network disk, each with a deadline.

    A stuck thread cannot be ended. So each caller has a Line with its own thread: only the later calls of the
    same caller wait for a stuck call, each until its deadline.

    Args:
        shown: the store's address for messages.
        answer_s: the deadline of a call, which includes its wait for earlier calls on the thread.
        threads: more than one for a caller whose calls need not wait for each other, such as requests.
    """

    def __init__(self, name: str, shown: str, answer_s: float, *, threads: int = 1) -> None:
        self.thread = ThreadPoolExecutor(threads, name)
        self._shown, self._answer_s = shown, answer_s

    async def ask(
        self, call: Callable[Arguments, Result], *arguments: Arguments.args, **named: Arguments.kwargs
    ) -> Result:
        """Return the call's result. A call that misses the deadline continues, but its result is lost."""
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
    """Stop thread pools and wait, up to a limit, until their threads have ended."""
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
