"""A stop that somebody asks for: work on a thread ends at its next step, a second signal ends the process."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest

from trainer_backend.run.stopping import STOPPING, until_on_thread

SLEEPER = """
import asyncio, sys, threading
from trainer_backend.run.stopping import stop_on_signals

async def main():
    with stop_on_signals(lambda line: print(line, flush=True)) as stop:
        print("ready", flush=True)
        await stop.wait()
        await asyncio.to_thread(threading.Event().wait)   # a step that never ends

asyncio.run(main())
"""


async def test_work_on_a_thread_that_is_not_stopped_gives_its_result():
    def work(check: Callable[[], None]) -> int:
        check()
        return 7

    assert await until_on_thread(asyncio.Event(), work) == 7


async def test_work_on_a_thread_ends_at_its_next_step_after_a_stop():
    stop, pause = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    steps: list[int] = []

    def work(check: Callable[[], None]) -> None:
        loop.call_soon_threadsafe(stop.set)
        for step in range(10**9):
            check()
            steps.append(step)
            pause.wait(0.001)

    assert await until_on_thread(stop, work) is None
    count = len(steps)
    await asyncio.sleep(0.05)
    assert len(steps) == count < 10**6


async def test_a_wait_that_is_cancelled_ends_the_thread_too():
    begun, ended = threading.Event(), threading.Event()
    pause = threading.Event()

    def work(check: Callable[[], None]) -> None:
        begun.set()
        try:
            while True:
                check()
                pause.wait(0.001)
        finally:
            ended.set()

    waiting = asyncio.ensure_future(until_on_thread(asyncio.Event(), work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(ended.wait, 10)


@pytest.mark.timeout(60)
def test_the_first_ctrl_c_is_answered_and_a_second_ends_the_process_whatever_its_threads_do():
    with subprocess.Popen([sys.executable, "-c", SLEEPER], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for expected in ("ready", STOPPING):
            assert process.stdout.readline().strip() == expected
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
