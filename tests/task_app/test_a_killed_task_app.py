"""`kill -9` of a task app: what it had started for others, and what those had started, ends too."""

import json
import os
import subprocess
import sys
import time

import httpx
import psutil
import pytest

from service_kit.process import READY, can_guard
from tests.task_app.counting import rollout

# An agent, an MCP server and a reward function that start a process in a session of its own, and hang.
PLUGINS = """
import subprocess, sys, time

from task_app.captures.agents import Agent
from task_app.reward_functions import reward_function


def hang():
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "asleep", __file__],
                     start_new_session=True)
    time.sleep(600)


@reward_function
def judge(messages, **kwargs):
    hang()


AGENTS = {"a": Agent([sys.executable, __file__])}
REWARD_FUNCTIONS = {"judge": judge}
if __name__ == "__main__":
    hang()
"""
PARTS = {
    "agent": {"env": {"env_name": "agent:a"}},
    "mcp": {"env": {"env_name": "mcp:child"}},
    "reward": {"env": {"env_name": "sokoban"}, "reward_function": "judge"},
}


def command_lines(mark):
    """Of the processes that name the mark, zombies left out."""
    found = psutil.process_iter(["cmdline", "status"])
    lines = [" ".join(one.info["cmdline"] or ()) for one in found if one.info["status"] != "zombie"]
    return [line for line in lines if mark in line]


def wait_until(holds, within_s):
    until_s = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < until_s
        time.sleep(0.02)


@pytest.mark.skipif(not can_guard(), reason="this system has no guard")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_left_of(part, tmp_path):
    plugins, servers, mark = tmp_path / "mine.py", tmp_path / "servers.json", str(tmp_path)
    plugins.write_text(PLUGINS)
    servers.write_text(
        json.dumps({"mcpServers": {"child": {"command": sys.executable, "args": [str(plugins)]}}})
    )
    environ = {**os.environ, "TURNWISE_MCP_SERVERS": str(servers)}
    command = [sys.executable, "-m", "task_app", "--port", "0", "--plugins", str(plugins)]
    with subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True) as app:
        try:
            url = next(line.removeprefix(READY).strip() for line in app.stdout if line.startswith(READY))
            request = rollout("r", policy={"policy_name": "random"}, **PARTS[part])
            answer = httpx.post(f"{url}/rollouts", json={"rollouts": [request]})
            assert answer.status_code == 202, answer.text
            wait_until(lambda: any("asleep" in line for line in command_lines(mark)), 60)
        finally:
            app.kill()
    wait_until(lambda: not command_lines(mark), 5)
