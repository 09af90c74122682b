"""`kill -9` of a task app: what it had started for others, and what those had started, ends too."""

import json
import sys

import httpx
import pytest

from service_kit.process import can_guard
from tests.processes import running, service, wait_until
from tests.task_app.counting import KEY, rollout

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


@pytest.mark.skipif(not can_guard(), reason="this system has no guard")
@pytest.mark.parametrize("part", PARTS)
def test_nothing_is_left_of(part, tmp_path):
    plugins, servers = tmp_path / "mine.py", tmp_path / "servers.json"
    plugins.write_text(PLUGINS)
    servers.write_text(
        json.dumps({"mcpServers": {"child": {"command": sys.executable, "args": [str(plugins)]}}})
    )
    words, environ = ("--port", "0", "--plugins", str(plugins)), {"TURNWISE_MCP_SERVERS": str(servers)}
    environ["ENVIRONMENT_API_KEY"] = KEY
    with service("task_app", *words, environ=environ) as (_, url):
        request = rollout("r", policy={"policy_name": "random"}, **PARTS[part])
        answer = httpx.post(f"{url}/rollouts", json={"rollouts": [request]}, headers={"X-API-Key": KEY})
        assert answer.status_code == 202, answer.text
        wait_until(lambda: running(f"asleep {plugins}"), within_s=60)
    # It was killed, as it is at the end of every test.
    wait_until(lambda: not running(str(tmp_path)), within_s=5)
