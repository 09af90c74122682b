"""What is wrong with a rollout request is said before anything runs, with its place."""

from typing import Any, get_args

import pytest

from shared_schemas.rollouts import PUBLISHED_PLACES, RolloutRequest
from task_app.complaints import list_keys
from tests.task_app.counting import rollout, running_app

OPENAI = {"policy_name": "openai", "config": {"inference_url": "http://127.0.0.1:1", "model": "m"}}


def openai(**config):
    return {"policy": {**OPENAI, "config": {**OPENAI["config"], **config}}}


TRAINING = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}
BAD = {
    "rollouts.0.env.env_name": rollout("a", env={"env_name": "countin"}),
    "rollouts.0.env.config.lenght": rollout("a", env={"env_name": "counting", "config": {"lenght": 3}}),
    "rollouts.0.env.config.length": rollout("a", env={"env_name": "counting", "config": {"length": 0}}),
    "rollouts.0.policy.policy_name": rollout("a", policy={"policy_name": "opnai"}),
    "rollouts.0.policy.config.temprature": rollout("a", **openai(temprature=1.0)),
    "rollouts.0.policy.config.top_p": rollout("a", **openai(top_p=0.0)),
    "rollouts.0.policy.config.inference_url": rollout("a", **openai(inference_url="http://evil.example/v1")),
    "rollouts.0.start.seed": rollout("a", start={"seed": -1}),
    "rollouts.0.start.sed": rollout("a", start={"sed": 1}),
    "rollouts.0.limits.max_decisions": rollout("a", limits={"max_decisions": 0}),
    "rollouts.0.limits.termination_regex": rollout("a", limits={"termination_regex": "(?=done)"}),
    "rollouts.0.limits.termination_target": rollout("a", limits={"termination_target": "all"}),
    "rollouts.0.ground_truth": rollout("a", ground_truth="x" * 100_000),
    "rollouts.0.policy.config.seed": rollout("a", **openai(seed=False)),
    "rollouts.0.rollout_id": rollout("a b"),
    "rollouts.0.step_rewards.mode": rollout("a", step_rewards={"mode": "decision_step"}),
    "rollouts.0.env.config.step_rewards.modes": rollout(
        "a", env={"env_name": "counting", "config": {"step_rewards": {"modes": "off"}}}
    ),
}


@pytest.mark.parametrize("place", BAD)
async def test_a_bad_field_is_named_with_its_place(place):
    async with running_app() as client:
        answer = await client.post("/rollouts", json={"rollouts": [BAD[place]]})
        assert answer.status_code == 422
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["where"] == place, answer.text
        assert (await client.get("/rollouts/a")).status_code == 404


@pytest.mark.parametrize(
    ("request_body", "words"),
    [
        (rollout("a", env={"env_name": "countin"}), "Did you mean 'counting'?"),
        (rollout("a", policy={"policy_name": "opnai"}), "Did you mean 'openai'? Known: openai, planned"),
        (rollout("a", limits={"termination_regex": "(done"}), "unclosed group"),
        (rollout("a", limits={"termination_regex": "[ab]{300}"}), "is 2700, and may be 2000 at most"),
        (rollout("a", limts={}), "Did you mean 'limits'?"),
        (rollout("a", training={"step_rewards_enabled": True}), "Did you mean 'step_rewards'? Known: "),
        (
            rollout("a", step_rewards={"step_rewards_mode": "off"}),
            "Did you mean 'step_rewards.mode'? Known: ",
        ),
        (rollout("a", step_rewards={"enabeld": True}), "Did you mean 'enabled'? Known: enabled, indicator"),
        (rollout("a", rollout={"step_rewards_enabled": True}), "Did you mean 'step_rewards'? Known: "),
        (rollout("a", env={"env_name": "counting", "config": TRAINING}), "it stands in a table 'training'"),
        (rollout("a", max_turns=3), "Did you mean 'limits.max_decisions'? Known: "),
        (rollout("a", termination_regex="x"), "Did you mean 'limits.termination_regex'? Known: "),
        (rollout("a", limits={"max_decision": 3}), "Did you mean 'max_decisions'?"),
        (rollout("a", **openai(temprature=1.0)), "Did you mean 'temperature'?"),
        (rollout("a", start={"seed": 2**31}), "found 2147483648"),
    ],
)
async def test_the_likely_intent_is_said(request_body, words):
    async with running_app() as client:
        answer = await client.post("/rollouts", json={"rollouts": [request_body]})
    assert words in answer.json()["detail"]


def test_every_published_name_leads_to_a_key_of_a_request():
    for place in PUBLISHED_PLACES.values():
        model: Any = RolloutRequest
        for part in place.split("."):
            assert part in list_keys(model)
            model = list(model.model_fields.values())[list_keys(model).index(part)].annotation
            model = next((kind for kind in get_args(model) if kind is not type(None)), model)


async def test_a_refused_ground_truth_is_not_repeated():
    async with running_app() as client:
        body = {"rollouts": [rollout("a", ground_truth="secret" * 20_000)]}
        answer = await client.post("/rollouts", json=body)
    assert "at most 100000 are allowed" in answer.json()["detail"]
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"{nope", "no JSON"), (b"", "body"), (b"[]", "body"), (b'{"rollouts": []}', "rollouts")],
)
async def test_a_body_that_is_no_batch_is_refused(content, words):
    async with running_app() as client:
        answer = await client.post("/rollouts", content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 422
    assert words in answer.json()["detail"]


async def test_a_batch_has_a_size_limit():
    async with running_app(max_rollouts_per_request=2) as client:
        answer = await client.post("/rollouts", json={"rollouts": [rollout(str(i)) for i in range(3)]})
    assert (answer.status_code, answer.json()["where"]) == (422, "rollouts")
    assert "at most 2" in answer.json()["detail"]


ON = {"enabled": True, "mode": "decision_stepwise"}


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
async def test_the_switches_work_from_each_of_their_homes(changes):
    async with running_app() as client:
        await client.post("/rollouts", json={"rollouts": [rollout("a", **changes)]})
        await client.get("/rollouts", params={"run_id": "r", "wait_s": 10})
        state = (await client.get("/rollouts/a")).json()
    records = [step["metadata"]["decision_rewards"] for step in state["trajectory"]["steps"]]
    assert [(record["ach_delta"], record["unique_delta"]) for record in records] == [(1, 1), (1, 0)]


async def test_two_homes_of_the_switches_must_agree():
    policy = {"policy_name": "planned", "config": {"step_rewards": ON}}
    body = {"rollouts": [rollout("a", policy=policy, step_rewards={**ON, "kind": "absolute"})]}
    async with running_app() as client:
        answer = await client.post("/rollouts", json=body)
    assert (answer.status_code, answer.json()["where"]) == (422, "rollouts.0.step_rewards")
