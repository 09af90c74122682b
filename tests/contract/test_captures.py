"""Agents that ask the real gateway through a captured endpoint: one iteration, tokens and rewards."""

import sys

import pyarrow.parquet as pq
import pytest

from tests.conftest import rows_of, tiny_job, train_job, warmed_up, with_its_plugins
from tests.trainer_backend.terminal import atif_schema
from trainer_backend.core.segments import build_segments
from trainer_backend.rundir.rollout_files import read_rollouts
from trainer_backend.terminal.atif import make_atif

# An agent that knows OpenAI's API and its variables: three calls of one conversation, and between them one of
# a sub-agent. It says of each call how well that went; the second got the first reward.
# `task_app/captures/test_dialects.py` has OpenAI's own client, which takes a second to import.
AGENT = """
import json, os, sys
import httpx

task = json.load(sys.stdin)
key = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
client = httpx.Client(base_url=os.environ["OPENAI_BASE_URL"], headers=key, timeout=60)
rewards = httpx.Client(base_url=os.environ["TURNWISE_CAPTURE_URL"],
                       headers={"X-API-Key": os.environ["OPENAI_API_KEY"]})
messages = [{"role": "system", "content": "Play."}, {"role": "user", "content": f"Go {task['seed'] % 7}."}]


def ask(messages):
    body = {"model": "gpt-4o", "messages": messages, "temperature": 0}
    reply = client.post("/chat/completions", json=body).raise_for_status().json()
    message = reply["choices"][0]["message"]
    return reply["id"], {name: value for name, value in message.items() if value is not None}


for turn in range(3):
    reply, message = ask(messages)
    messages += [message, {"role": "user", "content": "More."}]
    if turn == 0:
        helper, _ = ask([{"role": "system", "content": "Help."}, {"role": "user", "content": "Now."}])
        rewards.post("/rewards", json={"reward": 0.25, "response_id": helper}).raise_for_status()
rewards.post("/rewards", json={"reward": len(message.get("content", "")) / 100, "response_id": reply})
rewards.post("/rewards", json={"reward": task["bonus"]}).raise_for_status()
"""

PLUGINS = """
from task_app.captures.agents import Agent

AGENTS = {{"sub": Agent([{python!r}, {script!r}])}}
"""


@pytest.fixture(scope="module")
def run(trained, tmp_path_factory):
    folder = tmp_path_factory.mktemp("captured")
    (folder / "agent.py").write_text(AGENT)
    plugins = folder / "agents.py"
    plugins.write_text(PLUGINS.format(python=sys.executable, script=str(folder / "agent.py")))
    job = tiny_job(
        **warmed_up(trained), services__task_plugins=(str(plugins),),
        rollout={"env_name": "agent:sub", "env_config": {"bonus": 0.5}, "max_turns": 8, "max_tokens": 6,
                 "episodes_per_batch": 2},
        training__group_size=2, training__iterations=1, training__step_rewards_mode="env_sparse",
        training__batch_decisions=16, evaluation__instances=1,
    )  # fmt: skip
    with with_its_plugins(job) as there:
        directory, _, progress = train_job(there, folder / "run")
    assert progress.iteration == 1
    return directory


@pytest.fixture(scope="module")
def rollouts(run):
    return read_rollouts(run.rollouts_file("iteration_1"))


def test_the_learner_finds_the_log_probs_that_were_sampled(run):
    (row,) = rows_of(run, "iteration")
    assert row["decision/count"] == 8
    assert row["mismatch/logprob_max"] < 1e-4


def test_each_branch_continues_the_ids_that_were_sampled_in_it(rollouts):
    for rollout in rollouts:
        first, helper, second = build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
        assert [sorted(set(one.decision)) for one in (first, helper, second)] == [[0], [1], [2, 3]]
        assert list(second.token_ids[: len(first)]) == list(first.token_ids)
        assert second.sampled_positions[0] > len(first)


def test_no_token_is_trained_twice_and_none_is_lost(rollouts):
    for rollout in rollouts:
        segments = build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
        trained = [token for one in segments for token in one.token_ids[one.sampled_positions]]
        assert trained == [
            token for step in rollout.trajectory.steps for token in step.policy_logprobs.token_ids
        ]


def test_rewards_reach_the_call_that_they_name(run, rollouts):
    table = pq.read_table(run.rollouts_file("iteration_1")).to_pylist()
    for row, rollout in zip(table, rollouts, strict=True):
        text = rollout.trajectory.steps[3].action_taken["content"]
        assert [decision["reward"] for decision in row["decisions"]] == pytest.approx(
            [0.0, 0.25, 0.0, len(text) / 100 + 0.5]
        )
        assert rollout.trajectory.outcome_reward == pytest.approx(0.75 + len(text) / 100)


def test_as_atif_each_call_has_the_tokens_that_its_branch_saw(rollouts):
    for rollout in rollouts:
        document = make_atif(rollout)
        atif_schema.check(document)
        first, helper, second = build_segments(rollout.trajectory.steps, rollout_id=rollout.rollout_id)
        (of_helper,) = document["subagent_trajectories"]
        asked, _, again = _seen(document)
        assert [asked, again] == [list(first.token_ids), list(second.token_ids)]
        assert _seen(of_helper) == [list(helper.token_ids)]


def _seen(document):
    """The ids of each call's prompt and answer."""
    calls = [step["metrics"] for step in document["steps"] if "metrics" in step]
    return [call["prompt_token_ids"] + call["completion_token_ids"] for call in calls]


def test_sampling_is_the_job_s_and_each_call_has_its_own_seed(rollouts):
    sampling = [step.sampling for rollout in rollouts for step in rollout.trajectory.steps]
    assert {one.temperature for one in sampling} == {1.0} and len({one.seed for one in sampling}) == 8
    for rollout in rollouts:
        (warning,) = rollout.trajectory.warnings
        assert "temperature" in warning
