"""Policies behind ids, asked by /policy/step and by whole rollouts alike: what they decide counts."""

import asyncio

import pytest

from tests.task_app.counting import PlannedPolicy, add, boards, running_app
from tests.task_app.dialects.one_call.test_rollout import body, played
from tests.task_app.fake_inference import completion, fake_inference
from tests.task_app.rollout_client import waiting_boards
from tests.task_app.sessions.test_recovery import SECRET, app_on, killed, post
from tests.task_app.test_policy_routes import asked, create_env, create_policy

RANDOM = {"policy_name": "random", "config": {"seed": 7}, "env": {"env_name": "crafter"}}
CALL = {"id": "c", "type": "function", "function": {"name": "interact_many", "arguments": "{}"}}
REPLY = completion({"role": "assistant", "tool_calls": [CALL]})


def build_rollout(policy_id, **more):
    return body(decisions=3, env={"env_name": "crafter"}, policy={"policy_id": policy_id, **more})


def chosen(answer):
    return [step["tool_calls"][0]["arguments"] for step in answer["trajectories"][0]["steps"]]


async def test_a_living_policy_goes_on_after_a_restart_from_where_its_rollouts_left_it(tmp_path):
    async with app_on(tmp_path / "s") as client:
        policy_id = (await post(client, "/policy/create", RANDOM))["policy_id"]
        first = chosen(await post(client, "/rollout", build_rollout(policy_id)))
        taken = await post(client, "/policy/snapshot", {"policy_id": policy_id})
        left = killed(tmp_path / "s", tmp_path)
        expected = chosen(await post(client, "/rollout", build_rollout(policy_id)))
    assert taken["info"]["turn"] == 3
    async with app_on(left) as client:
        found = chosen(await post(client, "/rollout", build_rollout(policy_id)))
    assert found == expected
    assert found != first


async def test_a_rollout_may_not_ask_a_policy_whose_key_is_lost_and_may_bring_it(tmp_path):
    async with fake_inference(REPLY) as fake:
        config = {"inference_url": fake.url, "model": "m", "ask_token_ids": False}
        policy = {"policy_name": "openai", "config": config, "inference_key": SECRET}
        async with app_on(tmp_path / "s") as client:
            policy_id = (await post(client, "/policy/create", policy))["policy_id"]
            left = killed(tmp_path / "s", tmp_path)
        async with app_on(left) as client:
            key = {"Idempotency-Key": "k"}
            needed = await post(client, "/rollout", build_rollout(policy_id), status=428, **key)
            assert (needed["code"], needed["where"]) == ("inference_key_needed", "policy.inference_key")
            assert fake.bodies == []
            await post(client, "/rollout", build_rollout(policy_id, inference_key=SECRET), **key)
        assert {one["authorization"] for one in fake.headers} == {f"Bearer {SECRET}"}


async def test_another_inference_key_replaces_the_one_of_a_living_policy():
    async with running_app() as client, fake_inference(REPLY) as fake:
        config = {"inference_url": fake.url, "model": "m", "ask_token_ids": False}
        policy_id = await create_policy(client, "openai", config=config, inference_key="old")
        seen = {"observation": {"text": "x"}}
        for more in (seen, {**seen, "inference_key": "new"}, seen):
            assert (await asked(client, policy_id, **more)).status_code == 200
        newest = {"policy_id": policy_id, "inference_key": "newest"}
        await played(client, decisions=1, policy=newest)
        assert (await asked(client, policy_id, **seen)).json()["meta"]["turn"] == 5
    told = [one["authorization"].removeprefix("Bearer ") for one in fake.headers]
    assert told == ["old", "new", "new", "newest", "newest"]


async def test_a_policy_without_snapshots_says_that_it_cannot_take_another_key():
    scripted = boards(scripted=lambda: PlannedPolicy(add("a")))
    async with running_app(scripted) as client:
        policy_id = await create_policy(client, "scripted")
        refused = await asked(client, policy_id, observation={"text": "x"}, inference_key="new")
    assert (refused.status_code, refused.json()["where"]) == (422, "inference_key")
    assert "'planned' cannot take another inference_key" in refused.json()["detail"]


@pytest.mark.parametrize("part", ["env", "policy"])
async def test_a_busy_session_is_told_to_come_later_and_its_key_is_free(part):
    (policy, *_), plug_boards = waiting_boards(3)
    async with running_app(plug_boards) as client:
        env_id = await create_env(client)
        policy_id = await create_policy(client, "waiting")
        who = {"env": {"env_name": None, "env_id": env_id, "seed": None}} if part == "env" else {}
        first = asyncio.create_task(
            client.post("/rollout", json=body(decisions=1, policy={"policy_id": policy_id}, **who))
        )
        await policy.asked.wait()
        other = {"policy_name": "planned"} if part == "env" else {"policy_id": policy_id}
        again = {"json": body(decisions=1, policy=other, **who), "headers": {"Idempotency-Key": "k"}}
        busy = await client.post("/rollout", **again)
        policy.go.set()
        assert (await first).status_code == 200
        done = await client.post("/rollout", **again)
    assert (busy.status_code, busy.json()["code"]) == (503, "session_busy")
    assert busy.json()["where"] == f"{part}.{part}_id"
    assert busy.headers["retry-after"] == "1"
    assert (done.status_code, "idempotency-replayed" in done.headers) == (200, False)
