"""`kill -9` of the process of each role, of its parent, and of both: nothing of any role is left after 5 s.

role                              it alone           its parent alone     both
learner, replica                  has no children    here                 has no children
gateway with its engine, a job    test_after_a_kill_no_process_of_a_run_is_left (tests/contract)
ranks                             here               here                 here
vLLM servers, reward functions, agents, foreign environments and MCP, checks, which have a guard:
                                  here               here                 its guard sees its end, as alone
each link of a guard's chain      tests/service_kit/test_guard.py
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from service_kit.process import can_guard
from tests.processes import ROOT, runs, wait_until

# How many processes with these words must be there before the first kill.
GUARD, SLEEP, RANK = "guard.py", "sleep 600", "-u -m trainer_backend.learner.process"
COUNTS = {GUARD: 2 * 5 * 3, SLEEP: 2 * 4, RANK: 3 * 2}
# What ends with its parent does so before its first import of a package, which never ends here.
ENDLESS_IMPORTS = """
import sys, time
class Endless:
    def find_spec(self, name, path, target=None):
        if name == "structlog":
            time.sleep(600)
parts = "learner.process", "processes.gateway_process", "processes.engine_process"
if {f"trainer_backend.{part}" for part in parts} & set(sys.orig_argv):
    sys.meta_path.insert(0, Endless())
"""


def family(parent: int) -> dict[int, str]:
    """All processes below one, by id, with their commands."""
    found = {}
    for child in psutil.Process(parent).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            found[child.pid] = " ".join(child.cmdline())
    return found


def family_of_roles(parent: int, roles: Collection[int]) -> set[int]:
    """The guards of these processes, and all below."""
    children = psutil.Process(parent).children()
    families = [{child.pid, *(one.pid for one in child.children(recursive=True))} for child in children]
    return set().union(*(family for family in families if family & set(roles)))


def is_whole(commands: dict[int, str]) -> bool:
    counts = {word: sum(word in one for one in commands.values()) for word in COUNTS}
    return all(counts[word] >= count for word, count in COUNTS.items())


@pytest.mark.skipif(not can_guard(), reason="this system has no guard")
def test_after_a_kill_nothing_of_any_role_is_left(tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(ENDLESS_IMPORTS)
    command = [sys.executable, "-m", "tests.service_kit.parent", str(tmp_path / "roles")]
    (tmp_path / "roles").mkdir()
    environ = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, stdin=subprocess.PIPE) as parent:
        try:
            assert parent.stdout is not None
            alone, both = json.loads(parent.stdout.readline())
            wait_until(lambda: is_whole(family(parent.pid)), within_s=60)
            of_roles, whole = family_of_roles(parent.pid, alone), family(parent.pid)
            kill_all(alone)
            nothing_is_left({pid: whole[pid] for pid in of_roles})
            assert all(map(runs, both)), "no role ends another"
            rest = family(parent.pid)
            kill_all([*both, parent.pid])
            nothing_is_left(rest)
        finally:
            parent.kill()


def kill_all(processes: Collection[int]) -> None:
    for process in [psutil.Process(pid) for pid in processes]:
        process.kill()


def nothing_is_left(commands: dict[int, str]) -> None:
    until_s = time.monotonic() + 5
    while (left := [commands[pid] for pid in commands if runs(pid)]) and time.monotonic() < until_s:
        time.sleep(0.02)
    assert not left
