"""Questions that hang: given up in time, one at a time."""

import asyncio
import threading

import pytest

from trainer_backend.jobs.slots import Line, wait_for_threads
from trainer_backend.store.database import StoreUnavailable


async def test_an_answer_is_handed_on_and_so_is_an_error():
    line = Line("test", "sqlite:///x", 60.0)
    assert await line.ask(divmod, 7, 2) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        await line.ask(divmod, 7, 0)
    await wait_for_threads([line.thread], at_most_s=60.0)


async def test_one_that_hangs_is_given_up_and_holds_one_thread_whatever_is_asked_after_it():
    line, go, done = Line("hanging", "sqlite:///x", 0.05), threading.Event(), []

    def hanging() -> None:
        go.wait()
        done.append("late")

    with pytest.raises(StoreUnavailable, match=r"sqlite:///x did not answer within 0\.05 s"):
        await line.ask(hanging)
    for _ in range(5):
        with pytest.raises(StoreUnavailable):
            await line.ask(done.append, "never")
    assert sum(thread.name.startswith("hanging") for thread in threading.enumerate()) == 1
    async with asyncio.timeout(60):
        await wait_for_threads([line.thread], at_most_s=0.01)  # its end is not waited for without end
    go.set()
    await wait_for_threads([line.thread], at_most_s=60.0)
    assert done == ["late"], "what was given up before it began is not done later"
