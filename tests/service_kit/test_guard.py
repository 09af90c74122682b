"""A guard and its command: exit codes, signals, and that nothing is left whatever is killed."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain, combinations
from pathlib import Path

import psutil
import pytest

from service_kit.output import Output
from service_kit.process import Child, Guarded, can_guard
from tests.processes import running, wait_until

pytestmark = pytest.mark.skipif(not can_guard(), reason="this system has no guard")

# Starts a process in its own session, one whose parent ends, and one that it waits for.
_FAMILY = """
import subprocess, sys
sleeper = [sys.executable, "-c", "import time; time.sleep(60)", sys.argv[1]]
subprocess.Popen(sleeper, start_new_session=True)
orphan = f"import subprocess; subprocess.Popen({sleeper!r}, start_new_session=True)"
subprocess.run([sys.executable, "-c", orphan])
last = subprocess.Popen(sleeper)
print("ready", flush=True)
last.wait()
"""


@pytest.fixture
def mark(tmp_path: Path) -> Iterator[str]:
    """A word in the command lines of all that a test starts, of which nothing may be left."""
    yield str(tmp_path)
    wait_until(lambda: not running(str(tmp_path)), within_s=5)


def start(mark: str) -> Guarded:
    guarded = Guarded([sys.executable, "-c", _FAMILY, mark], stdout=subprocess.PIPE)
    assert guarded.stdout is not None
    assert guarded.stdout.readline() == b"ready\n"
    # A start returns in the middle of exec, when a process has no command line yet.
    wait_until(lambda: len(running(f"time.sleep(60) {mark}")) == 3)
    return guarded


_CHAIN = 4  # three guards and the command
ALONE_AND_IN_PAIRS = [*chain(*(combinations(range(_CHAIN), size) for size in (1, 2)))]


@pytest.mark.parametrize("killed", ALONE_AND_IN_PAIRS, ids=str)
def test_whatever_is_killed_nothing_is_left(killed: tuple[int, ...], mark: str):
    with start(mark) as guarded:
        line = [psutil.Process(guarded.pid)]
        while len(line) < _CHAIN:
            line.append(line[-1].children()[0])
        assert len(running(mark)) == _CHAIN + 3
        for place in killed:
            with suppress(psutil.NoSuchProcess):  # it has seen the end of the one before
                line[place].kill()
        assert guarded.wait(5) == -signal.SIGKILL


def test_a_killed_service_leaves_nothing(mark: str):
    code = (
        "import sys; from tests.service_kit.test_guard import start; start(sys.argv[1]); "
        "print('up', flush=True); sys.stdin.read()"
    )
    service = subprocess.Popen(
        [sys.executable, "-c", code, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with service:
        assert service.stdout is not None
        assert service.stdout.readline() == b"up\n"
        outer = psutil.Process(service.pid).children()[0]
        service.kill()
        outer.kill()  # with it, its nearest guard


@pytest.mark.parametrize(
    ("end", "number"),
    [
        (Guarded.terminate, signal.SIGTERM),  # only the command that waits ends
        (Guarded.kill, signal.SIGKILL),
        (lambda guarded: os.killpg(guarded.pid, signal.SIGKILL), signal.SIGKILL),
    ],
)
def test_its_end_a_kill_and_a_kill_of_the_first_guards_group_leave_nothing_of_what_it_started(
    end: Callable[[Guarded], None], number: int, mark: str
):
    with start(mark) as guarded:
        assert os.getpgid(guarded.pid) == guarded.pid
        end(guarded)
        assert guarded.wait(5) == -number


@pytest.mark.parametrize(
    ("command", "code"),
    [("exit 0", 0), ("exit 7", 7), ("kill -SEGV $$", -signal.SIGSEGV), ("exec 1>&-; exit 3", 3)],
)
def test_a_guard_ends_as_its_command_does(command: str, code: int):
    assert Guarded(["sh", "-c", command]).wait() == code


async def test_a_child_under_a_guard_is_asked_and_killed_as_any_other():
    trap = "trap 'echo bye; exit 3' TERM; echo $$; while :; do sleep 0.05; done"
    child = await Child.start(["sh", "-c", trap], stdout=subprocess.PIPE, is_ours=False)
    lines = child.lines()
    assert await anext(lines) == str(child.pid)
    assert not await child.end(20)
    assert [line async for line in lines] == ["bye"]
    assert child.exit_code == 3
    deaf = await Child.start(["sh", "-c", "trap '' TERM; echo up; sleep 600"], stdout=-1, is_ours=False)
    assert await anext(deaf.lines()) == "up"
    os.kill(psutil.Process(deaf.pid).ppid(), signal.SIGSTOP)  # its guard is stopped, too
    assert await deaf.end(0.05)
    assert deaf.exit_code == -signal.SIGKILL
    assert not psutil.pid_exists(deaf.pid)


@pytest.mark.parametrize("program", ["/nowhere/program", "/etc/hostname"])
async def test_a_command_that_cannot_be_run_is_an_error_of_the_start(program: str):
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match=program):
        await Child.start([program], prints=Output("test", "child"), is_ours=False)
    with pytest.raises(OSError, match=program):
        Guarded([program], stdin=subprocess.PIPE)
    assert len(os.listdir("/proc/self/fd")) == len(before), "no pipe is left"
