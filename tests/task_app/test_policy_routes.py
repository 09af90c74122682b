"""/policy: policies that the caller asks itself, and those that whole rollouts ask by their id."""

import asyncio

import pytest

from tests.task_app.counting import PlannedPolicy, add, boards, running_app
from tests.task_app.dialects.one_call.test_rollout import body, played
from tests.task_app.fake_inference import calling, completion, fake_inference, status, tokens
from tests.task_app.playing import ON, new_policy, post, refused, refused_at
from tests.task_app.rollout_client import waiting_app
from tests.task_app.sessions.test_recovery import SECRET, app_on, killed
from tests.task_app.slow import Gates, slow_boards
from tests.task_app.test_env_routes import TRAINING, created, stepped


async def asked(client, policy_id, **body):
    return await post(client, "/policy/step", policy_id=policy_id, **body)


async def test_a_bound_policy_waits_for_the_step_that_is_under_way():
    gates = Gates()
    async with running_app(slow_boards(gates)) as client:
        env_id = (await post(client, "/env/create", env_name="slow"))["env_id"]
        policy_id = await new_policy(client, "planned", bound_env_id=env_id)
        gates.entered.clear()
        stepping = asyncio.create_task(stepped(client, env_id, "a"))
        await asyncio.to_thread(gates.entered.wait, 10.0)
        deciding = asyncio.create_task(asked(client, policy_id, dry_run=True))
        for _ in range(100):
            await asyncio.sleep(0)  # long enough for an answer, if it did not wait
        gates.step.set()
        await stepping
        messages = (await deciding)["meta"]["messages"]
    assert messages[-1]["content"] == "step 1 past=1"


async def test_an_alias_names_a_policy_and_the_operators_server_is_what_it_asks():
    async with running_app(inference_url="http://vllm:8000", inference_model="qwen") as client:
        policy_id = await new_policy(client, "Crafter-ReAct")
        answer = await asked(client, policy_id, observation={"text": "x"}, dry_run=True)
    assert answer["meta"]["policy_name"] == "openai"


async def test_the_switches_stand_in_the_config_of_the_policy_or_its_environment_and_must_agree(client):
    env_id = (await created(client, config={"step_rewards": ON}))["env_id"]
    bound = {"policy_name": "planned", "bound_env_id": env_id}
    other = {"step_rewards": {"enabled": True, "mode": "env_sparse"}}
    assert (await refused(client, "/policy/create", **bound, config=other))[0] == 422
    await post(client, "/policy/create", **bound)
    env = {"env_name": "counting", "config": {"step_rewards": ON}}
    env_id = (await created(client))["env_id"]
    await new_policy(client, "planned", bound_env_id=env_id, env=env)
    assert "decision_rewards" in (await stepped(client, env_id, "a"))["metadata"], "as in a rollout request"
    await new_policy(client, "planned", env=env)
    both = {"policy_name": "planned", "env": env, "config": {"step_rewards": {}}}
    assert await refused_at(client, "/policy/create", **both) == (422, "env.config.step_rewards")
    for table in ("training", "rollout"):  # by their published names
        env_id = (await created(client))["env_id"]
        policy_id = await new_policy(client, "planned", bound_env_id=env_id, **{table: TRAINING})
        await stepped(client, env_id, "a")
        assert (await asked(client, policy_id))["meta"]["decision_rewards"]["turn"] == 1


async def test_a_second_bound_policy_cannot_change_the_switches_of_the_first(client):
    sparse = {"enabled": True, "mode": "env_sparse"}
    env_id = (await created(client))["env_id"]
    first = await new_policy(client, "planned", bound_env_id=env_id, config={"step_rewards": ON})
    other = {"policy_name": "planned", "bound_env_id": env_id, "config": {"step_rewards": sparse}}
    told = await refused(client, "/policy/create", **other)
    assert (told[0], told[2]) == (422, "config.step_rewards")
    assert first in told[3]
    step = await stepped(client, env_id, "a")
    assert "decision_rewards" in step["metadata"], "the first policy's switches hold"
    await post(client, "/policy/terminate", policy_id=first)
    await post(client, "/policy/create", **other)
    assert "decision_rewards" not in (await stepped(client, env_id, "a"))["metadata"]


async def test_an_expired_policy_takes_its_switches_with_it():
    async with running_app(session_idle_s=0.05) as client:
        env_id = (await created(client))["env_id"]
        await new_policy(client, "planned", bound_env_id=env_id, config={"step_rewards": ON})
        await asyncio.sleep(0.1)
        await post(client, "/env/reset", env_id=env_id)
        client._transport.app.state.services.expire()
        assert (await stepped(client, env_id, "a"))["metadata"] == {}


async def test_after_the_end_of_the_episode_no_model_is_asked_until_a_reset():
    async with running_app() as client, fake_inference(calling("a")) as fake:
        env_id = (await created(client))["env_id"]
        policy_id = await new_policy(client, "openai", bound_env_id=env_id, **fake.asked_by())
        await stepped(client, env_id, "end")
        told = await refused(client, "/policy/step", policy_id=policy_id)
        assert told[:2] == (409, "episode_over")
        assert fake.bodies == []
        await post(client, "/env/reset", env_id=env_id)
        await asked(client, policy_id)


async def test_a_dry_run_shows_the_prompt_and_asks_no_model():
    async with running_app() as client, fake_inference() as fake:
        env_id = (await created(client))["env_id"]
        await stepped(client, env_id, "a")
        policy_id = await new_policy(client, "openai", bound_env_id=env_id, **fake.asked_by())
        answer = await asked(client, policy_id, dry_run=True)
    assert answer["tool_calls"] == []
    assert [message["content"] for message in answer["meta"]["messages"]] == ["count", "step 1 past=1"]
    assert answer["meta"]["tools"][0]["function"]["name"] == "add"
    assert fake.bodies == []


async def test_a_model_is_asked_with_the_key_of_the_create_request_and_its_tokens_come_back():
    async with running_app() as client, fake_inference(calling("a", **tokens([1, 2], 0, [7]))) as fake:
        spec = {"inference_key": "k-1", "env": {"env_name": "counting"}}
        policy_id = await new_policy(client, "openai", **spec, **fake.asked_by())
        meta = (await asked(client, policy_id, observation={"text": "hp9", "data": {}}))["meta"]
    assert fake.headers[0]["authorization"] == "Bearer k-1"
    assert [message["content"] for message in fake.bodies[0]["messages"]] == ["count", "hp9 past=0"]
    assert (meta["token_ids"], meta["logprobs"], meta["sampling"]["temperature"]) == ([7], [-0.5], 1.0)
    assert meta["action_type"] == "tool_call"


async def test_an_unbound_policy_takes_messages_or_a_text():
    message = {"role": "user", "content": "go"}
    async with running_app() as client, fake_inference(calling("a")) as fake:
        policy_id = await new_policy(client, "openai", **fake.asked_by())
        for observation in ({"messages": [message]}, {"text": "go"}):
            await asked(client, policy_id, observation=observation)
        assert [body["messages"] for body in fake.bodies] == [[message], [message]]
        for observation in (None, {}, {"text": 3}, {"messages": []}, {"messages": [3]}):
            told = await refused(client, "/policy/step", policy_id=policy_id, observation=observation)
            assert (told[0], told[2].split(".")[0]) == (422, "observation")


@pytest.mark.parametrize("env", [None, {"env_name": "crafter"}, {"env_name": "documents"}])
async def test_an_observation_that_cannot_be_read_is_the_callers_mistake(real, env):
    observation = {"text": "x", "data": {"position": None}}
    policy_id = await new_policy(real, "crafter_teacher", env=env)
    told = await refused(real, "/policy/step", policy_id=policy_id, observation=observation)
    assert (told[0], told[2]) == (422, "observation"), told
    assert "cannot read this observation" in told[3]


async def test_what_goes_wrong_at_the_model_is_a_problem_with_its_code():
    too_long = {"error": {"code": "context_length_exceeded", "message": "9 > 8"}}
    answers = [status(400, too_long), status(404, {})]
    async with running_app() as client, fake_inference(*answers) as fake:
        policy_id = await new_policy(client, "openai", **fake.asked_by(max_attempts=1))
        for expected in ((422, "context_length_exceeded"), (502, "inference_refused")):
            told = await refused(client, "/policy/step", policy_id=policy_id, observation={"text": "x"})
            assert told[:2] == expected


EVIL = {"policy_name": "openai", "config": {"inference_url": "http://evil.example", "model": "m"}}


@pytest.mark.parametrize(
    ("changes", "where", "status_code"),
    [
        ({"policy_name": "plannd"}, "policy_name", 422),
        ({"config": {"nams": []}}, "config.nams", 422),
        ({"bound_env_id": "env_x"}, "bound_env_id", 404),
        ({"training": {"step_rewards_mode": "on"}}, "training.step_rewards_mode", 422),
        ({"event_rewards_kind": "unique"}, "event_rewards_kind", 422),
        ({"env": {"env_name": "x"}}, "env.env_name", 422),
        ({"env": {"env_name": "counting", "config": {"x": 1}}}, "env.config.x", 422),
        (EVIL, "config.inference_url", 422),
    ],
)
async def test_what_is_wrong_with_a_create_is_named(client, changes, where, status_code):
    body = {"policy_name": "planned"} | changes
    assert await refused_at(client, "/policy/create", **body) == (status_code, where)


RANDOM = {"config": {"seed": 7}, "env": {"env_name": "crafter"}}
CALL = {"id": "c", "type": "function", "function": {"name": "interact_many", "arguments": "{}"}}
REPLY = completion({"role": "assistant", "tool_calls": [CALL]})


def build_rollout(policy_id, **more):
    return body(decisions=3, env={"env_name": "crafter"}, policy={"policy_id": policy_id, **more})


def chosen(answer):
    return [step["tool_calls"][0]["arguments"] for step in answer["trajectories"][0]["steps"]]


async def test_a_living_policy_goes_on_after_a_restart_from_where_its_rollouts_left_it(tmp_path):
    async with app_on(tmp_path / "s") as client:
        policy_id = await new_policy(client, **RANDOM)
        first = chosen(await post(client, "/rollout", **build_rollout(policy_id)))
        taken = await post(client, "/policy/snapshot", policy_id=policy_id)
        left = killed(tmp_path / "s", tmp_path)
        expected = chosen(await post(client, "/rollout", **build_rollout(policy_id)))
    assert taken["info"]["turn"] == 3
    async with app_on(left) as client:
        found = chosen(await post(client, "/rollout", **build_rollout(policy_id)))
    assert found == expected
    assert found != first


async def test_a_rollout_may_not_ask_a_policy_whose_key_is_lost_and_may_bring_it(tmp_path):
    async with fake_inference(REPLY) as fake:
        spec = fake.asked_by(ask_token_ids=False)
        async with app_on(tmp_path / "s") as client:
            policy_id = await new_policy(client, "openai", **spec, inference_key=SECRET)
            left = killed(tmp_path / "s", tmp_path)
        async with app_on(left) as client:
            key = {"Idempotency-Key": "k"}
            needed = await refused(client, "/rollout", key, **build_rollout(policy_id))
            assert needed[:3] == (428, "inference_key_needed", "policy.inference_key")
            assert fake.bodies == []
            await post(client, "/rollout", key, **build_rollout(policy_id, inference_key=SECRET))
        assert {one["authorization"] for one in fake.headers} == {f"Bearer {SECRET}"}


async def test_another_inference_key_replaces_the_one_of_a_living_policy():
    async with running_app() as client, fake_inference(REPLY) as fake:
        spec = fake.asked_by(ask_token_ids=False)
        policy_id = await new_policy(client, "openai", **spec, inference_key="old")
        seen = {"observation": {"text": "x"}}
        for more in (seen, {**seen, "inference_key": "new"}, seen):
            await asked(client, policy_id, **more)
        newest = {"policy_id": policy_id, "inference_key": "newest"}
        await played(client, decisions=1, policy=newest)
        assert (await asked(client, policy_id, **seen))["meta"]["turn"] == 5
    told = [one["authorization"].removeprefix("Bearer ") for one in fake.headers]
    assert told == ["old", "new", "new", "newest", "newest"]


async def test_a_policy_without_snapshots_says_that_it_cannot_take_another_key():
    scripted = boards(scripted=lambda: PlannedPolicy(add("a")))
    async with running_app(scripted) as client:
        policy_id = await new_policy(client, "scripted")
        step = {"policy_id": policy_id, "observation": {"text": "x"}, "inference_key": "new"}
        told = await refused(client, "/policy/step", **step)
    assert (told[0], told[2]) == (422, "inference_key")
    assert "'planned' cannot take another inference_key" in told[3]


@pytest.mark.parametrize("part", ["env", "policy"])
async def test_a_busy_session_is_told_to_come_later_and_its_key_is_free(part):
    async with waiting_app(3) as (client, (policy, *_)):
        env_id = (await created(client))["env_id"]
        policy_id = await new_policy(client, "waiting")
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
