"""A stop by a signal: work on a thread ends at its next step, a second signal ends the process."""

import asyncio
import signal
import subprocess
import sys
import threading
from functools import partial

import pytest

from trainer_backend.run.stopping import STOPPING, Tell, until_on_thread

SLEEPER = """
import asyncio, sys, threading
from functools import partial
from trainer_backend.run.stopping import stop_on_signals

async def main():
    say = partial(print, flush=True)
    with stop_on_signals(tell=say, log=say) as stop:
        say("ready")
        await stop.wait()
        say(stop.by)
        await asyncio.to_thread(sys.stdin.readline)
        say("goes on")
        await asyncio.to_thread(threading.Event().wait)   # a step that never ends

asyncio.run(main())
"""


async def test_work_on_a_thread_that_is_not_stopped_gives_its_result():
    told: list[tuple[int, int]] = []

    def work(tell: Tell) -> int:
        tell(1, 2)
        return 7

    assert await until_on_thread(asyncio.Event(), lambda *counts: told.append(counts), work) == 7
    assert told == [(1, 2)]


async def test_work_on_a_thread_ends_at_its_next_step_after_a_stop():
    stop, pause = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    steps: list[tuple[int, int]] = []

    def work(tell: Tell) -> None:
        loop.call_soon_threadsafe(stop.set)
        for step in range(10**9):
            tell(step, 10**9)
            pause.wait(0.001)

    assert await until_on_thread(stop, lambda *counts: steps.append(counts), work) is None
    count = len(steps)
    await asyncio.sleep(0.05)
    assert len(steps) == count < 10**6


async def test_a_wait_that_is_cancelled_ends_the_thread_too():
    begun, ended = threading.Event(), threading.Event()
    pause = threading.Event()

    def work(tell: Tell) -> None:
        begun.set()
        try:
            while True:
                tell(0, 1)
                pause.wait(0.001)
        finally:
            ended.set()

    waiting = asyncio.ensure_future(until_on_thread(asyncio.Event(), lambda *counts: None, work))
    await asyncio.to_thread(begun.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(ended.wait, 10)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("before", "first", "by", "others", "last"),
    [
        ([], [signal.SIGINT], "Ctrl-C", [signal.SIGINT], "Ctrl-C"),
        # A terminal that closes sends it twice: by the kernel and by its shell.
        ([], [signal.SIGHUP], "SIGHUP", [signal.SIGHUP, signal.SIGINT], "Ctrl-C"),
        ([], [signal.SIGTERM], "SIGTERM", [signal.SIGTERM], "SIGTERM"),
        # Under nohup a closed terminal stops nothing.
        (["nohup"], [signal.SIGHUP, signal.SIGTERM], "SIGTERM", [signal.SIGINT], "Ctrl-C"),
    ],
)
def test_the_first_signal_is_answered_and_a_second_ends_the_process_whatever_its_threads_do(
    before: list[str], first: list[signal.Signals], by: str, others: list[signal.Signals], last: str
):
    command = [*before, sys.executable, "-c", SLEEPER]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        preexec_fn=partial(signal.signal, signal.SIGHUP, signal.SIG_DFL),  # the tests may run under nohup
    ) as process:  # fmt: skip
        assert process.stdin is not None and process.stdout is not None
        assert process.stdout.readline().strip() == "ready"
        for number in first:
            process.send_signal(number)
        assert [process.stdout.readline().strip() for _ in range(2)] == [STOPPING, by]
        for number in others[:-1]:
            process.send_signal(number)
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "goes on\n"
        process.send_signal(others[-1])
        assert process.stdout.readline().startswith(f"ended at once by {last}, ")
        assert process.wait(20) == 128 + others[-1]
