"""The agent and the commands of docs/captures.md, run as they stand there."""

import asyncio
import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from task_app.operator_plugins import with_plugins
from task_app.plugins import default_plug_boards
from tests.house.pages import cut, documents
from tests.house.sources import ROOT
from tests.task_app.counting import PlannedPolicy, boards, rollout
from tests.task_app.rollout_client import wait_for_all
from tests.task_app.served import served_app
from trainer_backend.job.load import parse_job

PAGE = (ROOT / "docs/captures.md").read_text(encoding="utf-8")
AGENT, PLUGINS = re.findall(r"```py(?:thon)?\n(.*?)```", PAGE, re.S)
(JOB,) = re.findall(r"```toml\n(.*?)```", PAGE, re.S)
COMMANDS, LATER = re.findall(r"```console\n(.*?)```", PAGE, re.S)
(ANSWERS,) = re.findall(r"```json\n(.*?)```", PAGE, re.S)


async def test_the_agent_of_the_page_plays_and_rewards_its_second_answer(tmp_path):
    assert len([line for line in AGENT.splitlines() if line.strip() and not line.startswith('"""')]) <= 15
    (tmp_path / "riddle_agent.py").write_text(AGENT)
    file = tmp_path / "my_agents.py"
    (name,) = re.findall(r'^"""(\w+\.py)"""', PLUGINS)
    assert name == file.name
    here = f"[{sys.executable!r}, {str(tmp_path / 'riddle_agent.py')!r}]"
    file.write_text(PLUGINS.replace('["python", "riddle_agent.py"]', here))
    rollout_table = parse_job(tomllib.loads(JOB), where="the page").config.rollout
    policy = PlannedPolicy({"type": "text", "content": "8"}, {"type": "text", "content": "It is 7."})
    plug_boards = with_plugins(boards(mine=lambda: policy), [file])
    async with served_app(plug_boards) as (client, _):
        env = {"env_name": rollout_table.env_name, "config": rollout_table.env_config}
        limits = {"max_decisions": rollout_table.max_turns, "timeout_s": rollout_table.timeout_s}
        request = rollout("a1", env=env, policy={"policy_name": "mine"}, limits=limits)
        answer = await client.post("/rollouts", json={"rollouts": [request]})
        assert answer.status_code == 202, answer.text
        result = (await wait_for_all(client, 1))["a1"]
    parts = [[part.value for part in step.reward_parts] for step in result.trajectory.steps]
    assert parts == [[], [1.0]]
    assert policy.seen[1][0].content == "What is 3 + 4?"


async def test_an_episode_by_hand_is_answered_as_the_page_shows_and_becomes_a_run(tmp_path):
    start, *first = lines_of(COMMANDS)
    assert start == "turnwise task-app --port 8001 &"
    async with served_app(default_plug_boards(), api_keys=()) as (client, _):
        script = "\n".join([*first, *lines_of(LATER)])
        script = script.replace("localhost:8001", str(client.base_url).removeprefix("http://"))
        program = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "COLUMNS": "150"}
        shell = await asyncio.create_subprocess_exec(
            "bash", "-ec", script, stdout=subprocess.PIPE, cwd=tmp_path, env=os.environ | program
        )
        output, _ = await shell.communicate()
    assert shell.returncode == 0
    shown, lines = list(documents(ANSWERS)), output.decode().splitlines()
    of_the_first, later = lines[: len(shown)], "\n".join(lines[len(shown) :])
    assert [cut(one, json.loads(line)) for one, line in zip(shown, of_the_first, strict=True)] == shown
    assert "runs/by-hand: 1 episodes" in later
    assert "outcome 1 (reward: sum" in later and "1 episodes, 1 decisions" in later


def test_the_libraries_that_are_tested_stand_on_the_page_with_their_versions():
    pins = [
        re.fullmatch(r"([\w-]+)(?:\[.*])?==(.*)", line)
        for file in (ROOT / "tests/clients/environments").glob("*.txt")
        for line in file.read_text().splitlines()
    ]
    assert pins and [f"{pin[1]} {pin[2]}" for pin in pins if f"{pin[1]} {pin[2]}" not in PAGE] == []


def lines_of(console: str) -> list[str]:
    return console.removeprefix("$ ").replace("\n$ ", "\0").split("\0")
