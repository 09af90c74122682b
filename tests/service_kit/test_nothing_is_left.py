"""`kill -9` of the process of each role, of its parent, and of both: nothing of any role is left after 5 s.

role                              it alone           its parent alone     both
learner, replica                  has no children    here                 has no children
gateway with its engine, a job    test_after_a_kill_no_process_of_a_run_is_left (tests/contract)
ranks, vLLM servers, reward functions, agents, foreign environments and MCP, checks      here
each link of a guard's chain      tests/service_kit/test_guard.py
"""

import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from service_kit.process import can_guard
from tests.processes import runs, wait_until

# How many processes with these words must be there before the kill.
GUARD, SLEEP, RANK = "guard.py", "sleep 600", "-u -m trainer_backend.learner.process"
COUNTS = {GUARD: 5 * 3, SLEEP: 4, RANK: 2}


def family(parent: int) -> dict[int, str]:
    """All processes below one, by id, with their commands."""
    found = {}
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return found


def is_whole(commands: dict[int, str]) -> bool:
    counts = {word: sum(word in one for one in commands.values()) for word in COUNTS}
    return all(counts[word] >= count for word, count in COUNTS.items())


@pytest.mark.skipif(not can_guard(), reason="this system has no guard")
@pytest.mark.parametrize("killed", ["the roles", "the parent", "the roles and the parent"])
def test_after_a_kill_nothing_of_any_role_is_left(killed: str, tmp_path: Path):
    command = [sys.executable, "-m", "tests.service_kit.parent", str(tmp_path)]
    command.append("all" if killed == "the parent" else "parents")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            roles = json.loads(parent.stdout.readline())
            wait_until(lambda: is_whole(family(parent.pid)), within_s=60)
            before = family(parent.pid)
            victims = [psutil.Process(pid) for pid in roles] if "roles" in killed else []
            for victim in [*victims, *([psutil.Process(parent.pid)] if "parent" in killed else [])]:
                victim.kill()
            until_s = time.monotonic() + 5
            while (left := [before[pid] for pid in before if runs(pid)]) and time.monotonic() < until_s:
                time.sleep(0.02)
            assert not left
        finally:
            parent.kill()
