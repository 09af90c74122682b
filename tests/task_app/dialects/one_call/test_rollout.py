"""POST /rollout: one call, the whole trajectory back, also where it ends from outside."""

import asyncio
import json

import pytest

from task_app.errors import JournalFailed
from tests.task_app.counting import KEY, PlannedPolicy, add, boards, running_app
from tests.task_app.fake_inference import calling, fake_inference, status, tokens
from tests.task_app.playing import new_policy, post, refused, refused_at
from tests.task_app.rollout_client import waiting_app
from tests.task_app.test_env_routes import created, stepped

ON = {"enabled": True, "mode": "decision_stepwise", "indicator_lambda": 0.5}
TEXT = {"type": "text", "content": "I walk"}


def body(*, decisions=2, policy=None, env=None, **rest):
    return {
        "run_id": "run",
        "env": {"env_name": "counting", "seed": 1, **(env or {})},
        "policy": policy or {"policy_name": "planned"},
        "ops": ["agent", "env"] * decisions,
        "on_done": "terminate",
        **rest,
    }


async def played(client, **changes):
    return await post(client, "/rollout", **body(**changes))


def alive(env_id, seed=None):
    return {"env_name": None, "env_id": env_id, "seed": seed}


def with_policy(*moves):
    return boards(scripted=lambda: PlannedPolicy(*moves))


SCRIPTED = {"policy_name": "scripted"}


async def test_a_rollout_comes_back_whole():
    async with running_app(with_policy(add("a", "x"), add("a", "b"))) as client:
        policy = {**SCRIPTED, "config": {"step_rewards": ON}}
        answer = await played(client, policy=policy, record={"return_trace": True})
    (trajectory,) = answer["trajectories"]
    # RolloutTrajectory of synth-ai 0.2.16 requires these.
    required = {"env_id": str, "policy_id": str, "steps": list, "length": int, "inference_url": str}
    assert {name: type(trajectory[name]) for name in required} == required
    first, second = trajectory["steps"]
    assert first["obs"]["text"] == "step 0"
    assert first["tool_calls"] == [{"tool_name": "add", "arguments": {"names": ["a", "x"]}}]
    assert (first["reward"], first["done"], second["done"], second["truncated"]) == (1.0, False, True, True)
    assert second["info"]["achievements_added"] == ["b"]
    assert second["info"]["meta"]["decision_rewards"] == {
        "turn": 2, "ach_delta": 2, "unique_delta": 1, "all": ["a", "b"], "unique": ["b"]
    }  # fmt: skip
    assert second["info"]["stepwise"]["reward"] == 1.5
    assert trajectory["final"]["observation"]["achievements_status"] == {"a": True, "b": True}
    assert "rollout_status" not in trajectory["final"]
    assert trajectory["decision_samples"][1] == {
        "decision_index": 2, "indicator": 1, "r_i": 1.5,
        "actions": [{"tool": "add", "args": {"names": ["a", "b"]}}],
    }  # fmt: skip
    assert answer["metrics"] == {
        "episode_returns": [2.0], "mean_return": 2.0, "num_steps": 2, "num_episodes": 1,
        "outcome_score": 2.0, "events_score": 3.0, "details": answer["metrics"]["details"],
    }  # fmt: skip
    assert answer["metrics"]["details"]["stepwise"]["final_achievements"] == ["a", "b"]
    assert [one["turn"] for one in answer["trace"]["decision_rewards"]] == [0, 1], "from 0 there"
    assert (answer["aborted"], answer["ops_executed"], answer["warnings"]) == (False, 4, [])


async def test_without_the_switches_there_is_no_stepwise_block(client):
    answer = await played(client)
    assert "stepwise" not in answer["metrics"]["details"]
    assert "decision_samples" not in answer["trajectories"][0]
    assert "decision_rewards" not in answer["trajectories"][0]["steps"][0]["info"]["meta"]
    assert (answer["trace"], answer["metrics"]["events_score"]) == (None, None)


@pytest.mark.parametrize(
    ("move", "told"),
    [
        (TEXT, "partial_no_tool_calls"),
        ({"type": "tool_call", "name": "sub", "arguments": {}}, "partial_invalid_action"),
    ],
)
async def test_a_refused_decision_is_the_last_and_stands_there_with_its_reason(move, told):
    async with running_app(with_policy(add("a"), move, add("b"))) as client:
        answer = await played(client, decisions=5, policy=SCRIPTED)
    (trajectory,) = answer["trajectories"]
    last = trajectory["steps"][-1]
    assert (len(trajectory["steps"]), last["done"]) == (2, True)
    assert last["info"]["reason"] in told
    final = trajectory["final"]
    assert (final["rollout_status"], final["at_op"], final["stop_reason"]) == (told, 4, "invalid_action")
    assert final["error"] == last["info"]["error"]


async def test_a_model_that_cannot_be_asked_is_a_soft_failure_with_the_steps_so_far():
    refused = status(400, {"error": {"message": "no"}})
    async with fake_inference(calling("a"), refused) as server, running_app() as client:
        config = {"inference_url": f"{server.url}?cid=7", "model": "m"}
        policy = {"policy_name": "crafter", "config": config}
        answer = await played(client, decisions=5, policy=policy, mode="rl")
    (trajectory,) = answer["trajectories"]
    assert trajectory["length"] == 1
    assert trajectory["final"]["rollout_status"] == "partial_policy_error"
    assert "refused" in trajectory["final"]["error"]
    assert server.bodies[0]["tool_choice"] == "required"
    assert answer["trace_correlation_id"] == "7"
    assert answer["pipeline_metadata"]["trace_correlation_id"] == trajectory["trace_correlation_id"] == "7"
    assert "?cid=7" in answer["pipeline_metadata"]["inference_url"]
    assert "?cid=7" in trajectory["steps"][0]["info"]["meta"]["inference_url"]


async def test_a_broken_environment_is_no_soft_failure():
    async with running_app(with_policy(add("boom"))) as client:
        told = await refused(client, "/rollout", **body(policy=SCRIPTED))
    assert told[:2] == (424, "critical_error")


async def test_max_time_s_ends_a_slow_policy_and_also_a_wait_for_a_place():
    async with waiting_app(2, max_concurrent_rollouts=1) as (client, policies):
        waiting = {"policy_name": "waiting"}
        slow = asyncio.create_task(played(client, policy=waiting, safety={"max_time_s": 0.3}, run_id="one"))
        await policies[0].asked.wait()
        queued = await played(client, policy=waiting, safety={"max_time_s": 0.05}, run_id="two")
        ran = await slow
        assert (await client.get("/run/status/two")).json()["rollouts"]["cancelled"] == 1
    assert not policies[1].asked.is_set()
    for answer in (queued, ran):
        (trajectory,) = answer["trajectories"]
        assert trajectory["final"]["rollout_status"] == "partial_max_time"
        assert (trajectory["length"], answer["aborted"]) == (0, False)


async def test_on_done_reset_plays_on_in_a_new_episode_of_the_same_world():
    async with running_app(with_policy(add("a"), add("b", "end"), add("a"), add("a"))) as client:
        policy = {**SCRIPTED, "config": {"step_rewards": ON}}
        answer = await played(client, decisions=4, policy=policy, on_done="reset")
    first, second = answer["trajectories"]
    assert [len(one["steps"]) for one in (first, second)] == [2, 2]
    assert first["steps"][-1]["terminated"]
    assert second["steps"][0]["info"]["achievements_added"] == ["a"], "first time in its episode"
    assert second["steps"][0]["info"]["meta"]["decision_rewards"]["turn"] == 1
    assert answer["metrics"]["episode_returns"] == [2.0, 1.0]
    assert (answer["metrics"]["num_episodes"], answer["metrics"]["mean_return"]) == (2, 1.5)
    assert "2 episodes of seed 1 were played" in answer["warnings"][0]


async def test_a_living_environment_and_a_living_policy_go_on_where_they_stand():
    async with running_app(with_policy(add("b"))) as client:
        env_id = (await created(client, config={"step_rewards": ON}))["env_id"]
        await stepped(client, env_id, "a")
        policy = {"policy_id": await new_policy(client, "scripted")}
        answer = await played(client, env=alive(env_id, seed=5), policy=policy)
        after = await stepped(client, env_id, "b")
    (trajectory,) = answer["trajectories"]
    assert trajectory["steps"][0]["obs"]["achievements_counts"] == {"a": 1, "b": 0}
    assert trajectory["steps"][0]["info"]["meta"]["decision_rewards"]["unique"] == ["b"]
    assert after["info"]["turn"] == 4
    assert after["observation"]["achievements_counts"] == {"a": 1, "b": 3}
    assert any("env.seed is ignored" in warning for warning in answer["warnings"])


async def test_a_living_environment_that_ended_is_restarted_or_left():
    async with running_app(with_policy(add("end"))) as client:
        env_id = (await created(client))["env_id"]
        changes = {"env": alive(env_id), "policy": SCRIPTED}
        answer = await played(client, **changes, on_done="reset")
        assert "was restarted" in answer["warnings"][0]
        answer = await played(client, **changes)
        assert answer["trajectories"][0]["steps"][0]["terminated"]
        over = await refused(client, "/rollout", **body(**changes))
    assert over[:2] == (409, "episode_over")


async def test_an_unknown_session_is_a_404(client):
    for part, named in (("env", alive("x")), ("policy", {"policy_id": "x"})):
        told = await refused_at(client, "/rollout", **body(**{part: named}))
        assert told == (404, f"{part}.{part}_id")


async def test_record_is_obeyed_and_what_is_not_there_is_told(client):
    record = {
        "trajectories": False, "logprobs": True, "value": True,
        "return_trace": True, "trace_format": "structured",
    }  # fmt: skip
    answer = await played(client, record=record)
    assert answer["trajectories"] == []
    assert answer["metrics"]["num_steps"] == 2
    assert len(answer["trace"]["event_history"]) == 2
    told = " ".join(answer["warnings"])
    assert all(words in told for words in ("record.logprobs", "record.value", "same as full"))


async def test_exact_tokens_come_back_where_they_are_asked_for():
    async with fake_inference(calling("a", **tokens([1, 2], 0, [3, 4]))) as server, running_app() as client:
        config = {"inference_url": server.url, "model": "m"}
        policy = {"policy_name": "crafter-react", "config": config}
        answer = await played(client, decisions=1, policy=policy, record={"logprobs": True})
    (step,) = answer["trajectories"][0]["steps"]
    assert step["logprob"] == -1.0
    assert step["info"]["meta"]["policy_logprobs"]["token_ids"] == [3, 4]
    assert answer["warnings"] == []


WAITING = json.dumps(body(policy={"policy_name": "waiting"})).encode()
JSON = {"content-type": "application/json"}


async def asked(app, gone, **headers):
    """POST /rollout from a client that is gone when the test says so; what it was sent."""
    messages, sent = [{"type": "http.request", "body": WAITING, "more_body": False}], []

    async def receive():
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    told = {"host": "127.0.0.1", "x-api-key": KEY, **JSON, **headers}
    raw = [(name.encode(), value.encode()) for name, value in told.items()]
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "headers": raw,
        "path": "/rollout", "raw_path": b"/rollout", "query_string": b"", "root_path": "", "scheme": "http",
    }  # fmt: skip
    await app(scope, receive, send)
    return sent


async def test_a_client_that_goes_away_gives_its_place_back():
    async with waiting_app(1) as (client, (policy,)):
        gone = asyncio.Event()
        playing = asyncio.create_task(asked(client._transport.app, gone))
        await policy.asked.wait()
        gone.set()
        await playing
        counts = (await client.get("/run/status/run")).json()["rollouts"]
    assert counts == {"unfinished": 0, "finished": 0, "failed": 0, "cancelled": 1}


async def test_a_client_with_an_idempotency_key_may_go_away_and_come_back_for_the_answer():
    async with waiting_app(1) as (client, (policy,)):
        gone, key = asyncio.Event(), {"idempotency-key": "once"}
        playing = asyncio.create_task(asked(client._transport.app, gone, **key))
        await policy.asked.wait()
        gone.set()
        policy.go.set()
        (start, *_) = await playing
        again = await client.post("/rollout", content=WAITING, headers={**key, **JSON})
        counts = (await client.get("/run/status/run")).json()["rollouts"]
    assert (start["status"], again.status_code, counts["finished"]) == (200, 200, 1)


KEYED = {"Idempotency-Key": "k"}
WAITS = {"policy_name": "waiting"}


async def decided(policy, *, decisions):
    """Let it decide so often, and be asked once more."""
    for _ in range(decisions):
        await policy.asked.wait()
        policy.asked.clear()
        policy.go.set()
        policy.go.clear()
    await policy.asked.wait()


@pytest.mark.parametrize("decisions", [0, 1])
async def test_a_stop_of_the_task_app_is_no_abort_and_its_answer_is_not_kept(decisions):
    async with waiting_app(3, max_concurrent_rollouts=1) as (client, (policy, queued, _)):
        services = client._transport.app.state.services
        asked = {"json": body(policy=WAITS), "headers": KEYED}
        playing = asyncio.create_task(client.post("/rollout", **asked))
        await decided(policy, decisions=decisions)
        waiting = asyncio.create_task(client.post("/rollout", json=body(policy=WAITS, run_id="queued")))
        while services.runner.unfinished()["queued"] == 0:
            await asyncio.sleep(0)
        await services.drain(within_s=0.0)
        answers = [await playing, await waiting, await client.post("/rollout", **asked)]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
        assert "idempotency-replayed" not in answer.headers
    assert not queued.asked.is_set()


async def test_what_a_stopping_task_app_did_to_a_living_environment_is_told():
    async with waiting_app(1) as (client, (policy,)):
        env_id = (await created(client))["env_id"]
        playing = asyncio.create_task(played(client, policy=WAITS, env=alive(env_id)))
        await decided(policy, decisions=1)
        await client._transport.app.state.services.drain(within_s=0.0)
        answer = await playing
    assert (answer["aborted"], answer["metrics"]["num_steps"]) == (True, 1)
    assert "the task app stopped after 1 decision" in answer["warnings"][0]


async def test_an_abort_while_the_task_app_stops_is_an_abort():
    async with waiting_app(1) as (client, (policy,)):
        playing = asyncio.create_task(played(client, policy=WAITS))
        await policy.asked.wait()
        services = client._transport.app.state.services
        services.runner.begin_drain()
        await services.runner.abort("run")
        assert (await playing)["aborted"]


class FullDisk:
    """A journal that takes so many decisions and no more."""

    def __init__(self, takes):
        self._left = takes

    def ready(self, session):
        if not self._left:
            raise JournalFailed("the disk is full", hint="free space")
        self._left -= 1

    def reset(self, session): ...

    def add_step(self, session, requests): ...


@pytest.mark.parametrize("takes", [0, 1])
async def test_a_journal_that_cannot_be_written_is_no_abort(client, takes):
    env_id = (await created(client))["env_id"]
    session = client._transport.app.state.services.environments.find(env_id)
    session.journal = FullDisk(takes)
    answer = await client.post("/rollout", json=body(env=alive(env_id)))
    told = answer.json()
    if not takes:
        assert (answer.status_code, told["code"]) == (507, "journal_failed")
        return
    (trajectory,) = told["trajectories"]
    assert (told["aborted"], len(trajectory["steps"]), session.turn) == (False, 1, 1)
    assert trajectory["final"]["rollout_status"] == "partial_journal_failed"
    assert trajectory["final"]["error"] == "the disk is full"
