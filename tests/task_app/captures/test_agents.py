"""Agents as processes of the task app: how rollouts of them end, and what is left of them."""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from service_kit.errors import SettingsError
from service_kit.logs import configure_logs
from task_app.captures.agents import Agent, agent_plugin
from task_app.errors import ContextLengthExceeded
from task_app.operator_plugins import with_plugins
from task_app.plugins import default_plug_boards
from tests.processes import runs, wait_until
from tests.task_app.counting import PlannedPolicy, boards, rollout
from tests.task_app.playing import post, refused, refused_at
from tests.task_app.rollout_client import play
from tests.task_app.served import served_app

# What every agent below begins with; without OpenAI's client, whose import takes a second.
PRELUDE = """
import json, os, sys, threading, time, urllib.error, urllib.request

task = json.load(sys.stdin)


def post(path, key=os.environ["OPENAI_API_KEY"], **body):
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    url = os.environ["TURNWISE_CAPTURE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ask(text):
    return post("/v1/chat/completions", model="m", messages=[{"role": "user", "content": text}])
"""


def build_board(tmp_path: Path, script: str, make_policy=None, command=None, **fields):
    """Boards with the agent `a`, and the policy `mine`, which says one word."""
    file = tmp_path / "agent.py"
    file.write_text(PRELUDE + script)
    agent = Agent(command or [sys.executable, "-S", str(file)], **fields)
    policies = boards(mine=make_policy or (lambda: PlannedPolicy({"type": "text", "content": "Yes."})))
    return replace(policies, environments={**policies.environments, "agent:a": agent_plugin("a", agent)})


async def played(tmp_path, script, *, make_policy=None, config=None, limits=None, changes=None, **fields):
    """The rollout of this agent as it ended."""
    plug_boards = build_board(tmp_path, script, make_policy, **fields)
    async with served_app(plug_boards) as (client, _):
        request = rollout(
            "a1",
            env={"env_name": "agent:a", "config": config or {}},
            policy={"policy_name": "mine"},
            limits={"max_decisions": 3, "timeout_s": 20.0} | (limits or {}),
            **(changes or {}),
        )
        return (await play(client, request))["a1"]


async def test_an_agent_is_told_its_task_and_gets_its_variables(tmp_path):
    script = """
ask(json.dumps(task))
post("/rewards", reward=float(os.environ["BONUS"]))
assert "ENVIRONMENT_API_KEY" not in os.environ and "PYTHONPATH" not in os.environ
"""
    result = await played(
        tmp_path, script, config={"level": 2}, changes={"ground_truth": 42}, variables={"BONUS": "0.5"},
    )  # fmt: skip
    (step,) = result.trajectory.steps
    assert step.observation_data.messages[0].content == '{"seed": 1, "rollout_id": "a1", "level": 2}'
    assert (result.trajectory.env_name, result.trajectory.outcome_reward) == ("agent:a", 0.5)
    assert (result.trajectory.stop_reason, result.trajectory.terminated) == ("environment_done", True)


@pytest.mark.parametrize(
    ("script", "fields", "reason", "calls"),
    [
        ('ask("x"); sys.exit(3)', {"exit_codes": (0, 3)}, "environment_done", 1),
        ('ask("x"); post("/end"); time.sleep(600)', {}, "environment_done", 1),
        ('[ask(task["ground_truth"]) for _ in "abcd"]', {"sees_ground_truth": True}, "max_decisions", 3),
    ],
    ids=["an allowed exit code", "it ends its capture", "a refusal by a limit, then any exit code"],
)
async def test_an_agent_ends_its_episode(tmp_path, script, fields, reason, calls):
    result = await played(tmp_path, script, changes={"ground_truth": "x"}, **fields)
    assert (result.trajectory.stop_reason, len(result.trajectory.steps)) == (reason, calls)
    assert result.trajectory.steps[0].observation_data.messages[0].content == "x"


@pytest.mark.parametrize(
    ("script", "limits", "code", "words"),
    [
        (
            'print("nothing to do")', {}, "agent_failed",
            "agent:a ended with exit code 0 and had no model call answered; its last output: nothing to do",
        ),
        ('post("/v1/responses", key="wrong", model="m")', {}, "agent_failed", "401: Unauthorized"),
        ("time.sleep(600)", {"timeout_s": 0.5}, "deadline_exceeded", ""),
    ],
    ids=["no call", "a wrong key", "no call and no end"],
)  # fmt: skip
async def test_an_agent_without_an_answered_call_is_a_failure(tmp_path, script, limits, code, words):
    result = await played(tmp_path, script, limits=limits)
    assert result.failure.code == code and words in result.failure.detail


async def test_an_agent_whose_first_prompt_does_not_fit_is_lost_for_that_reason(tmp_path):
    too_long = ContextLengthExceeded("300 tokens of 256")
    result = await played(tmp_path, 'ask("x")', make_policy=lambda: PlannedPolicy(too_long))
    assert (result.failure.code, result.failure.recurs) == ("context_length_exceeded", True)
    assert "('agent:a', seed 1): 300 tokens of 256" in result.failure.detail


async def test_an_agent_that_fails_is_a_failure_with_the_end_of_its_output(tmp_path):
    configure_logs("debug")
    with capture_logs() as logs:
        result = await played(tmp_path, 'ask("x"); sys.exit("lost " + os.environ["OPENAI_API_KEY"])')
    assert (result.failure.code, result.failure.decisions_done) == ("agent_failed", 1)
    assert result.failure.detail == "agent:a ended with exit code 1; its last output: lost [key]"
    (line,) = [entry for entry in logs if entry["event"] == "agent_printed"]
    assert (line["agent"], line["text"]) == ("agent:a", "lost [key]")


async def test_an_agent_that_never_ends_is_killed_with_its_children(tmp_path):
    pids = tmp_path / "pids"
    script = f"""
ask("x")
child = os.fork()
if child:
    open({str(pids)!r}, "w").write(f"{{os.getpid()}} {{child}}")
while True:
    time.sleep(60)
"""
    result = await played(tmp_path, script, limits={"timeout_s": 1.5})
    assert (result.trajectory.stop_reason, result.trajectory.truncated) == ("deadline", True)
    wait_until(lambda: not any(runs(int(pid)) for pid in pids.read_text().split()))


async def test_a_request_names_agents_and_never_commands_or_what_an_agent_cannot_have(tmp_path):
    async with served_app(build_board(tmp_path, "")) as (client, _):
        for change in (
            {"snapshot_turns": [1]},
            {"multi_turn": {"max_user_turns": 1}},
            {"interaction": {"name": "gsm8k"}},
            {"final_view": True},
        ):
            request = rollout("a1", env={"env_name": "agent:a"}, policy={"policy_name": "mine"}, **change)
            found = await refused_at(client, "/rollouts", rollouts=[request])
            assert found == (422, f"rollouts.0.{next(iter(change))}")
        told = await refused(client, "/env/create", env_name="agent:b")
        assert told[0] == 422 and "Did you mean 'agent:a'?" in told[3]
        env_id = (await post(client, "/env/create", env_name="agent:a"))["env_id"]
        told = await refused(client, "/env/step", env_id=env_id, tool_calls=[])
        assert told[0] == 422 and "POST /rollouts" in told[3]


def test_a_plug_ins_file_has_agents(tmp_path):
    file = tmp_path / "mine.py"
    text = "from task_app.captures.agents import Agent\nAGENTS = {{'a': {}}}"
    file.write_text(text.format(f"Agent([{sys.executable!r}])"))
    assert "agent:a" in with_plugins(default_plug_boards(), [file]).environments
    wrong = {
        "'python agent.py'": r"AGENTS\['a'\] is str; write Agent\(",
        "Agent('python agent.py')": "the command of an Agent is 'python agent.py'; it is a list",
        "Agent([])": r"the command of an Agent is \[\]",
    }
    for value, sentence in wrong.items():
        file.write_text(text.format(value))
        with pytest.raises(SettingsError, match=sentence):
            with_plugins(default_plug_boards(), [file])


async def test_a_program_with_a_path_is_looked_up_where_the_agent_runs(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(f"#!{sys.executable} -S\n{PRELUDE}\nask('x')")
    script.chmod(0o700)
    result = await played(tmp_path, "", command=["./run.py"], folder=tmp_path)
    assert len(result.trajectory.steps) == 1


async def test_a_program_that_is_not_there_is_told_before_anything_runs(tmp_path):
    async with served_app(build_board(tmp_path, "", command=[str(tmp_path / "nothing")])) as (client, _):
        told = await refused(client, "/env/create", env_name="agent:a")
        assert told[0] == 422 and os.fspath(tmp_path / "nothing") in told[3]
