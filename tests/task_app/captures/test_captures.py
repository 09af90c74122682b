"""A capture over HTTP: branches, exact ids, rewards, keys, limits and its end."""

import asyncio
from itertools import chain, repeat

import pytest

from shared_schemas.trajectory import Trajectory, prompts
from task_app.captures.session import Capture
from task_app.errors import PolicyUnavailable
from tests.task_app.counting import KEY, PlannedPolicy, WaitingPolicy, add, boards, rollout, running_app
from tests.task_app.fake_inference import completion, fake_inference, status, tokens
from tests.task_app.playing import post, refused, refused_at
from tests.task_app.served import served_app


async def opened(client, policy="mine", **opening):
    spec = policy if isinstance(policy, dict) else {"policy_name": policy}
    return await post(client, "/captures", policy=spec, **opening)


def path_of(capture):
    return f"/captures/{capture['capture_id']}"


async def ask(client, capture, *messages, status_code=200):
    """Ask with these messages: texts are the user's, and an answer of before stands as it came."""
    body = [{"role": "user", "content": one} if isinstance(one, str) else one for one in messages]
    path = f"{path_of(capture)}/v1/chat/completions"
    answer = await client.post(path, json={"model": "m", "messages": body})
    assert answer.status_code == status_code, answer.text
    return answer.json() if status_code != 200 else answer.json()["choices"][0]["message"]


async def ended(client, capture) -> Trajectory:
    answer = await client.post(f"{path_of(capture)}/end")
    assert (await client.get(path_of(capture))).json() == answer.json()
    return Trajectory.model_validate(answer.json()["trajectory"])


def texts(*words):
    return boards(mine=lambda: PlannedPolicy(*({"type": "text", "content": word} for word in words)))


async def opened_at(client, server, **config):
    """A capture whose policy asks this server."""
    config = {"inference_url": server.url, "model": "job/actor", **config}
    return await opened(client, {"policy_name": "openai", "config": config})


def ids_of_calls(trajectory):
    calls = [step.policy_logprobs for step in trajectory.steps]
    return [(call.prompt_ids_reused, call.prompt_token_ids, call.token_ids) for call in calls]


def said(text, prompt, reused, sampled):
    return completion({"role": "assistant", "content": text}, **tokens(prompt, reused, sampled))


async def test_branches_keep_their_ids_and_the_trajectory_tells_them_in_order():
    # main: 1 2 | 3, then 4 | 5 after it; helper: 1 9 | 8. The gateway tells 4 relative to main's own ids.
    answers = said("A", [1, 2], 0, [3]), said("B", [1, 9], 0, [8]), said("C", [4], 3, [5])
    async with fake_inference(*answers) as fake, running_app(boards()) as client:
        capture = await opened_at(client, fake, seed=7)
        first = await ask(client, capture, "main")
        await ask(client, capture, {"role": "system", "content": "help"}, "sub")
        await ask(client, capture, "main", first, "more")
        trajectory = await ended(client, capture)
    ids = [fake.headers[i]["x-turnwise-rollout"] for i in range(3)]
    assert ids[0] == ids[2] and ids[1] == f"{ids[0]}~2"
    assert len({body["seed"] for body in fake.bodies}) == 3
    # Each is told relative to the decision before: 1 2 3; 1 of these, 9, 8; 1 of these, 2 3 4, 5.
    assert ids_of_calls(trajectory) == [(0, (1, 2), (3,)), (1, (9,), (8,)), (1, (2, 3, 4), (5,))]
    shown = [[message.content for message in prompt] for prompt in prompts(trajectory.steps)]
    assert shown == [["main"], ["help", "sub"], ["main", "A", "more"]]


async def test_another_system_prompt_and_an_edited_answer_begin_branches():
    made = []

    def policy():
        made.append(PlannedPolicy({"type": "text", "content": "A"}))
        return made[-1]

    async with running_app(boards(mine=policy)) as client:
        capture = await opened(client)
        made.clear()  # the one that only checks the config
        system = [{"role": "system", "content": text} for text in ("be brief", "be kind")]
        answer = await ask(client, capture, system[0], "x")
        await ask(client, capture, system[0], "x", answer, "y")
        await ask(client, capture, system[1], "x", answer, "y")
        await ask(client, capture, system[0], "x", answer | {"content": "B"}, "y")
    assert [len(one.seen) for one in made] == [2, 1, 1]


async def test_two_calls_at_once_are_two_decisions_in_the_order_of_their_answers():
    policies = [WaitingPolicy() for _ in range(3)]
    given = iter(policies)
    async with running_app(boards(mine=lambda: next(given))) as client:
        capture = await opened(client)
        slow = asyncio.create_task(ask(client, capture, "slow"))
        await policies[1].asked.wait()
        fast = asyncio.create_task(ask(client, capture, "fast"))
        await policies[2].asked.wait()
        policies[2].go.set()
        await fast
        policies[1].go.set()
        await slow
        trajectory = await ended(client, capture)
    shown = [prompt[0].content for prompt in prompts(trajectory.steps)]
    assert (shown, [step.turn for step in trajectory.steps]) == (["fast", "slow"], [1, 2])


async def test_rewards_go_to_the_call_that_is_named_and_the_episode_s_to_the_last():
    async with running_app(texts("A", "B", "C")) as client:
        capture = await opened(client)
        path = path_of(capture)
        for word in ("x", "y", "z"):
            await ask(client, capture, word)
        response_id = f"chatcmpl-{capture['capture_id']}-2"
        for body in ({"reward": 1.0, "turn": 1}, {"reward": 0.5, "response_id": response_id}, {"reward": 2}):
            await post(client, f"{path}/rewards", **body)
        again = await refused(client, f"{path}/rewards", reward=3, turn=2)
        trajectory = await ended(client, capture)
        late = await refused(client, f"{path}/rewards", reward=3, turn=3)
    assert (again[:2], late[:2]) == ((409, "reward_conflict"), (409, "episode_over"))
    parts = [[part.value for part in step.reward_parts] for step in trajectory.steps]
    assert parts == [[1.0], [0.5], [2.0]]
    assert trajectory.outcome_reward == 3.5 and trajectory.warnings == ()


async def test_a_call_and_a_reward_repeated_with_their_keys_have_one_effect():
    async with running_app(texts("A", "B")) as client:
        capture = await opened(client)
        path = path_of(capture)
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        for name, sent in (("v1/chat/completions", body), ("rewards", {"reward": 1.0, "turn": 1})):
            key = {"Idempotency-Key": name}
            one, again = [await client.post(f"{path}/{name}", json=sent, headers=key) for _ in "ab"]
            assert (one.status_code, again.status_code, one.json()) == (200, 200, again.json())
        trajectory = await ended(client, capture)
    assert (len(trajectory.steps), trajectory.outcome_reward) == (1, 1.0)


async def test_captures_count_as_held_and_calls_are_refused_at_the_limit_until_some_are_deleted():
    async with running_app(texts("A"), max_held_bytes=20_000) as client:
        capture = await opened(client)
        services = client._transport.app.state.services
        await ask(client, capture, "x" * 5_000)
        once = services.captures.held.total
        assert 10_000 <= once <= 14_000, "the prompt of the decision, and that of the branch"
        assert f"turnwise_held_bytes {float(once)}" in (await client.get("/metrics")).text
        await ask(client, capture, "y" * 5_000)
        error = (await ask(client, capture, "z", status_code=429))["error"]
        assert (error["type"], error["code"]) == ("rate_limit_error", "capacity_reached")
        assert "bytes of rollouts and captures are held, of max_held_bytes = 20000" in error["message"]
        for path, body in (
            ("/captures", {"policy": {"policy_name": "mine"}}),
            ("/rollouts", {"rollouts": [rollout("a")]}),
        ):
            assert (await refused(client, path, **body))[:2] == (429, "capacity_reached")
        assert len((await ended(client, capture)).steps) == 2, "what was answered can be read"
        await client.delete(path_of(capture))
        assert services.captures.held.total == 0
        await ask(client, await opened(client), "x")


async def test_a_call_is_refused_whose_trajectory_would_exceed_a_reply_and_the_rest_is_read():
    async with running_app(texts("A"), max_reply_bytes=8_000) as client:
        capture = await opened(client)
        answer = await ask(client, capture, "x" * 2_000)
        refusal = await ask(client, capture, "y" * 5_000, status_code=400)
        assert "bytes, of max_reply_bytes = 8000" in refusal["error"]["message"]
        await ask(client, capture, "x" * 2_000, answer, "a short one fits")
        await client.post(f"{path_of(capture)}/rewards", json={"reward": 1.0})
        trajectory = await ended(client, capture)
    shown = [prompt[-1].content[:1] for prompt in prompts(trajectory.steps)]
    assert (shown, len(trajectory.model_dump_json()) <= 8_000) == (["x", "a"], True)


async def test_ids_stay_exact_after_an_answer_that_was_too_large_to_record():
    answers = said("A", [1, 2], 0, [3]), said("B" * 5_000, [1, 9], 0, [8]), said("C", [4], 3, [5])
    async with fake_inference(*answers) as fake, running_app(boards(), max_reply_bytes=6_000) as client:
        capture = await opened_at(client, fake)
        first = await ask(client, capture, "main")
        await ask(client, capture, "other", status_code=400)
        await ask(client, capture, "main", first, "more")
        trajectory = await ended(client, capture)
    assert ids_of_calls(trajectory) == [(0, (1, 2), (3,)), (3, (4,), (5,))]


@pytest.mark.parametrize("way", ["answered", "streamed", "failed", "refused", "expired"])
async def test_nothing_is_left_of_a_capture_that_is_deleted_or_expires(way, live):
    move = PolicyUnavailable("gone") if way == "failed" else {"type": "text", "content": "A"}
    idle = {"session_idle_s": 1e-9} if way == "expired" else {}
    async with served_app(boards(mine=lambda: PlannedPolicy(move)), **idle) as (client, server):
        capture = await opened(client, limits={"max_decisions": 1})
        path = path_of(capture)
        body = {"model": "m", "stream": way == "streamed", "messages": [{"role": "user", "content": "x"}]}
        await client.post(f"{path}/v1/chat/completions", json=body)
        if way == "refused":
            refusal = await ask(client, capture, "y", status_code=400)
            assert refusal["error"]["code"] == "episode_over"
        assert (await client.get(path)).json()["calls"] == (way != "failed")
        assert live.count(Capture) == 1
        services = server.config.app.state.services
        services.expire()
        if way != "expired":
            assert (await client.delete(path)).status_code == 200
        await live.until_gone(Capture)
        assert services.captures.held.total == 0


async def test_a_call_whose_client_goes_away_is_no_decision_and_its_branch_goes_on():
    waiting, after = WaitingPolicy(), PlannedPolicy({"type": "text", "content": "A"})
    given = chain([PlannedPolicy(), waiting], repeat(after))
    async with served_app(boards(mine=lambda: next(given))) as (client, _):
        capture = await opened(client)
        first = asyncio.create_task(ask(client, capture, "x"))
        await waiting.asked.wait()
        first.cancel()
        # The next call takes the place of the lost one as soon as the service has seen its end.
        while (await client.get(path_of(capture))).json()["calls"] == 0:
            await ask(client, capture, "x")
        trajectory = await ended(client, capture)
    assert [step.turn for step in trajectory.steps] == [1] and len(after.seen) == 1


async def test_a_call_whose_client_went_away_is_asked_again_when_it_is_repeated_with_its_key():
    waiting = WaitingPolicy()
    given = chain([PlannedPolicy(), waiting], repeat(PlannedPolicy({"type": "text", "content": "A"})))
    async with served_app(boards(mine=lambda: next(given))) as (client, _):
        capture = await opened(client)
        path = f"{path_of(capture)}/v1/chat/completions"
        body = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
        send = {"json": body, "headers": {"Idempotency-Key": "c1"}}
        first = asyncio.create_task(client.post(path, **send))
        await waiting.asked.wait()
        first.cancel()
        answer = await client.post(path, **send)  # it waits for the end of the first one
        assert answer.json()["choices"][0]["message"]["content"] == "A"
        assert len((await ended(client, capture)).steps) == 1


async def test_a_reward_is_a_finite_number_for_a_call_that_is_there():
    async with running_app(texts("A")) as client:
        capture = await opened(client)
        await ask(client, capture, "x")
        path = f"{path_of(capture)}/rewards"
        for named in ({"turn": 2}, {"response_id": "chatcmpl-other-1"}, {"response_id": "x"}):
            told = await refused(client, path, reward=1.0, **named)
            assert (told[0], told[2]) == (404, next(iter(named)))
            assert "turns 1 to 1" in told[3]
        for reward in ("NaN", "1e999", '"much"'):
            body, kind = f'{{"reward": {reward}}}', {"Content-Type": "application/json"}
            assert (await client.post(path, content=body, headers=kind)).status_code == 422
        await post(client, path, reward=1.5e308, turn=1)
        assert await refused_at(client, path, reward=1.5e308) == (422, "reward"), "nor is their sum infinite"
        await post(client, path, reward=-1e308)
        assert (await ended(client, capture)).outcome_reward == 0.5e308


async def test_every_call_of_an_episode_has_an_id_of_its_own():
    ids = ["c_3", "c", "c"]
    moves = [{"type": "tool_call", "name": "add", "arguments": {}, "id": one} for one in ids]
    policy = PlannedPolicy(*moves)
    async with running_app(boards(mine=lambda: policy)) as client:
        capture = await opened(client)
        answers = [await ask(client, capture, word) for word in "xyz"]
        assert [one["tool_calls"][0]["id"] for one in answers] == ["c_3", "c", "c_3_3"]


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"limits": {"termination_regex": "x"}}, "limits.termination_regex"),  # without effect on a capture
        ({"limits": {"max_invalid_decisions": 3}}, "limits.max_invalid_decisions"),
        ({"limits": {"invalid_action_penalty": -0.5}}, "limits.invalid_action_penalty"),
        ({"policy": {"policy_name": "plannd"}}, "policy.policy_name"),
        # Its config has no keys.
        ({"policy": {"policy_name": "planned", "config": {"seed": 3}}}, "policy.config.seed"),
    ],
)
async def test_what_is_wrong_is_told_when_the_capture_is_opened(client, changes, where):
    spec = {"policy": {"policy_name": "planned"}} | changes
    assert await refused_at(client, "/captures", **spec) == (422, where)


async def test_a_capture_s_key_opens_it_alone():
    async with running_app(texts("A")) as client:
        mine, other = await opened(client), await opened(client)
        del client.headers["X-API-Key"]

        async def get(path, key):
            return (await client.get(path, headers={"X-API-Key": key})).status_code

        own = f"/captures/{mine['capture_id']}"
        assert await get(own, mine["key"]) == await get(f"{own}/v1/models", mine["key"]) == 200
        assert await get(own, KEY) == 200
        assert await get(own, other["key"]) == await get(own, "x") == 401
        assert await get("/info", mine["key"]) == await get("/rollouts?run_id=r", mine["key"]) == 401
        assert await get("/captures/capture_0", mine["key"]) == 401


async def test_a_prompt_that_is_too_long_is_refused_and_a_shorter_one_goes_on():
    long = status(400, {"error": {"code": "context_length_exceeded", "message": "300 tokens of 256"}})
    answers = said("A", [1], 0, [2]), long, said("B", [1], 0, [3]), long
    async with fake_inference(*answers) as fake, running_app(boards()) as client:
        capture = await opened_at(client, fake)
        first = await ask(client, capture, "x")
        refusal = await ask(client, capture, "x", first, "y", status_code=400)
        assert refusal["error"]["code"] == "context_length_exceeded"
        await ask(client, capture, "a summary")
        await ask(client, capture, "x", first, "y", status_code=400)
        trajectory = await ended(client, capture)
    assert (trajectory.stop_reason, len(trajectory.steps)) == ("context_length", 2)


async def test_what_the_server_of_the_model_refuses_is_the_agent_s_mistake_but_for_a_key():
    body = {"error": {"code": "invalid_request", "message": "the template cannot render it"}}
    refusals = [status(code, body) for code in (400, 413, 422)]
    key = status(401, {"error": {"code": "unauthorized"}})
    async with (
        fake_inference(*refusals, said("B", [1], 0, [3]), key) as fake,
        running_app(boards()) as client,
    ):
        capture = await opened_at(client, fake)
        for _ in refusals:
            error = (await ask(client, capture, "x", status_code=400))["error"]
            assert error["code"] == "inference_refused" and "cannot render it" in error["message"]
        await ask(client, capture, "y")
        await ask(client, capture, "z", status_code=502)
        state = (await client.get(path_of(capture))).json()
        assert (state["status"], state["calls"]) == ("failed", 1)
        assert state["failure"]["code"] == "inference_refused"


async def test_a_policy_that_cannot_be_asked_fails_the_capture_and_not_the_reward():
    policy = PlannedPolicy(add("a"), PolicyUnavailable("the gateway is gone"))
    async with running_app(boards(mine=lambda: policy)) as client:
        capture = await opened(client)
        await ask(client, capture, "x")
        await ask(client, capture, "y", status_code=502)
        state = (await client.post(f"{path_of(capture)}/end")).json()
        assert (state["status"], state["calls"], state["trajectory"]) == ("failed", 1, None)
        assert state["failure"] == {
            "code": "inference_unavailable", "detail": "the gateway is gone", "decisions_done": 1,
            "recurs": False,
        }  # fmt: skip
        assert (await client.delete(path_of(capture))).json() == {"ok": True}
        assert (await client.get(path_of(capture))).status_code == 404
