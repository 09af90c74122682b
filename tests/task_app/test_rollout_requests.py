"""What is wrong with a rollout request is said before anything runs, with its place."""

from typing import Any, get_args

import pytest

from shared_schemas.rollouts import PUBLISHED_PLACES, RolloutRequest
from task_app.complaints import list_keys
from tests.task_app.counting import rollout, running_app
from tests.task_app.playing import ON, refused, refused_at
from tests.task_app.rollout_client import play

TRAINING = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}


def openai(**config):
    given = {"inference_url": "http://127.0.0.1:1", "model": "m", **config}
    return {"policy": {"policy_name": "openai", "config": given}}


def counting(**config):
    return {"env": {"env_name": "counting", "config": config}}


# What is wrong with a request; its place, and words that say the likely intent.
BAD = [
    ({"env": {"env_name": "countin"}}, "env.env_name", "Did you mean 'counting'?"),
    (counting(lenght=3), "env.config.lenght", ""),
    (counting(length=0), "env.config.length", ""),
    (counting(step_rewards={"modes": "off"}), "env.config.step_rewards.modes", ""),
    (counting(**TRAINING), "env.config.step_rewards_enabled", "it stands in a table 'training'"),
    ({"policy": {"policy_name": "opnai"}}, "policy.policy_name", "'openai'? Known: openai, planned"),
    (openai(temprature=1.0), "policy.config.temprature", "Did you mean 'temperature'?"),
    (openai(top_p=0.0), "policy.config.top_p", ""),
    (openai(inference_url="http://evil.example/v1"), "policy.config.inference_url", ""),
    (openai(seed=False), "policy.config.seed", ""),
    ({"start": {"seed": -1}}, "start.seed", ""),
    ({"start": {"seed": 2**31}}, "start.seed", "found 2147483648"),
    ({"start": {"sed": 1}}, "start.sed", ""),
    ({"limits": {"max_decisions": 0}}, "limits.max_decisions", ""),
    ({"limits": {"max_decision": 3}}, "limits.max_decision", "Did you mean 'max_decisions'?"),
    ({"limits": {"termination_regex": "(?=done)"}}, "limits.termination_regex", ""),
    ({"limits": {"termination_regex": "(done"}}, "limits.termination_regex", "unclosed group"),
    ({"limits": {"termination_regex": "[ab]{300}"}}, "limits.termination_regex", "2700"),
    ({"limits": {"termination_target": "all"}}, "limits.termination_target", ""),
    ({"limts": {}}, "limts", "Did you mean 'limits'?"),
    ({"max_turns": 3}, "max_turns", "Did you mean 'limits.max_decisions'? Known: "),
    ({"termination_regex": "x"}, "termination_regex", "Did you mean 'limits.termination_regex'? Known: "),
    ({"training": TRAINING}, "training", "Did you mean 'step_rewards'? Known: "),
    ({"rollout": TRAINING}, "rollout", "Did you mean 'step_rewards'? Known: "),
    ({"step_rewards": {"mode": "decision_step"}}, "step_rewards.mode", ""),
    ({"step_rewards": {"step_rewards_mode": "x"}}, "step_rewards.step_rewards_mode", "'step_rewards.mode'?"),
    ({"step_rewards": {"enabeld": True}}, "step_rewards.enabeld", "'enabled'? Known: enabled, indicator"),
    ({"ground_truth": "secret" * 20_000}, "ground_truth", "at most 100000 are allowed"),
    ({"rollout_id": "a b"}, "rollout_id", ""),
]


@pytest.mark.parametrize(("changes", "where", "words"), BAD)
async def test_a_bad_field_is_named_with_its_place_and_the_likely_intent(client, changes, where, words):
    status, _, found, told = await refused(client, "/rollouts", rollouts=[rollout("a") | changes])
    assert (status, found) == (422, f"rollouts.0.{where}"), told
    assert words in told.split(" | ")[0]
    assert "secret" not in told
    assert (await client.get("/rollouts/a")).status_code == 404


def test_every_published_name_leads_to_a_key_of_a_request():
    for place in PUBLISHED_PLACES.values():
        model: Any = RolloutRequest
        for part in place.split("."):
            assert part in list_keys(model)
            model = list(model.model_fields.values())[list_keys(model).index(part)].annotation
            model = next((kind for kind in get_args(model) if kind is not type(None)), model)


async def test_a_batch_has_one_rollout_at_least_and_so_many_at_most():
    async with running_app(max_rollouts_per_request=2) as client:
        assert await refused_at(client, "/rollouts", rollouts=[]) == (422, "rollouts")
        told = await refused(client, "/rollouts", rollouts=[rollout(str(i)) for i in range(3)])
    assert (told[0], told[2]) == (422, "rollouts")
    assert "at most 2" in told[3]


@pytest.mark.parametrize(
    "changes",
    [
        {"step_rewards": ON},
        {"env": {"env_name": "counting", "config": {"step_rewards": ON}}},
        {"policy": {"policy_name": "planned", "config": {"step_rewards": ON}}},
        {"policy": {"policy_name": "planned", "config": {"step_rewards": ON}}, "step_rewards": ON},
        {"env": {"env_name": "counting", "config": {"rollout": {**TRAINING, "episodes": 2}}}},
        {"policy": {"policy_name": "planned", "config": {"training": TRAINING}}},
    ],
)
async def test_the_switches_work_from_each_of_their_homes(client, changes):
    steps = (await play(client, rollout("a", **changes)))["a"].trajectory.steps
    records = [step.metadata.decision_rewards for step in steps]
    assert [(record.ach_delta, record.unique_delta) for record in records] == [(1, 1), (1, 0)]


async def test_two_homes_of_the_switches_must_agree(client):
    policy = {"policy_name": "planned", "config": {"step_rewards": ON}}
    request = rollout("a", policy=policy, step_rewards={**ON, "kind": "absolute"})
    told = await refused_at(client, "/rollouts", rollouts=[request])
    assert told == (422, "rollouts.0.step_rewards")
