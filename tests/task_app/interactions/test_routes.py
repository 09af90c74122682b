"""/interaction over HTTP: start, respond, score, finalize, and sessions that are never finalised."""

import asyncio
from dataclasses import replace
from pathlib import Path

from task_app.interactions.config_file import load_interactions
from task_app.plugins import InteractionEntry
from task_app.settings import Settings
from tests.task_app.counting import boards, running_app
from tests.task_app.interactions import users
from tests.task_app.playing import post, refused

GSM8K = Path(__file__).parents[3] / "configs/interactions/gsm8k.yaml"
MESSAGES = [{"role": "user", "content": "6 x 7?"}, {"role": "assistant", "content": "#### 42"}]


def app_with(*kinds, **settings):
    entries = {kind.__name__.lower(): InteractionEntry(kind.__name__.lower(), kind, {}) for kind in kinds}
    return running_app(replace(boards(), interactions=entries), **settings)


async def test_the_four_calls_of_an_episode():
    plugs = replace(boards(), interactions=load_interactions(GSM8K, Settings()))
    async with running_app(plugs) as client:
        started = await post(client, "/interaction/start", kwargs={"ground_truth": "42"})
        assert started["name"] == "gsm8k"
        one = {"interaction_id": started["interaction_id"]}
        answer = await post(client, "/interaction/respond", **one, messages=MESSAGES)
        assert answer == {
            "should_terminate": True, "response": "Your response is correct!", "score": 1.0,
            "metadata": {}, "turn": 1,
        }  # fmt: skip
        assert await post(client, "/interaction/score", **one) == {"score": 1.0}
        again = await refused(client, "/interaction/respond", **one, messages=MESSAGES)
        assert again[:3] == (409, "episode_over", "interaction_id")
        assert await post(client, "/interaction/finalize", **one) == {"ok": True}
        gone = await refused(client, "/interaction/finalize", **one)
        assert gone[:3] == (404, "unknown_id", "interaction_id")
        unmatchable = await refused(client, "/interaction/start", kwargs={"ground_truth": "42 apples"})
        assert unmatchable[:2] == (424, "interaction_failed")
        capabilities = (await client.get("/info")).json()["capabilities"]
        assert capabilities["interactions"] == capabilities["number_interactions"] == ["gsm8k"]


async def test_each_session_is_finalised_once_however_it_ends():
    async with app_with(users.Noted, max_sessions=2) as client:
        ids = [(await post(client, "/interaction/start"))["interaction_id"] for _ in range(2)]
        full = await refused(client, "/interaction/start")
        assert full[:2] == (429, "capacity_reached")
        assert "POST /interaction/finalize those that are not needed" in full[3]
        await post(client, "/interaction/finalize", interaction_id=ids[0])
        assert users.counts() == {"start": 2, "finalise": 1}
    # the other one ends with the service
    assert users.counts() == {"start": 2, "finalise": 2}


async def test_an_idle_session_is_finalised():
    async with app_with(users.Noted, session_idle_s=1e-6, sweep_every_s=1e6) as client:
        services = client._transport.app.state.services
        await post(client, "/interaction/start")
        assert (len(services.interaction_sessions), len(services.interactions)) == (1, 1)
        services.expire()
        while len(services.interactions):
            await asyncio.sleep(0)
        assert users.counts() == {"start": 1, "finalise": 1}
        page = (await client.get("/metrics")).text
    assert 'turnwise_sessions{kind="interaction"} 0.0' in page
    assert "turnwise_interactions 0.0" in page


async def test_a_start_that_cannot_be_is_refused():
    async with app_with(users.Noted) as client:
        for body, code, where in (
            ({"name": "notd"}, "unknown_name", "name"),
            ({"kwargs": {"messages": []}}, "invalid_request", "kwargs"),
            ({"kwargs": {"x": "y" * 200_000}}, "invalid_request", "kwargs"),
            ({"kwarg": {}}, "invalid_request", "kwarg"),
        ):
            assert (await refused(client, "/interaction/start", **body))[:3] == (422, code, where)
        assert users.BOOK == []
    async with running_app() as client:  # without a file
        *found, told = await refused(client, "/interaction/start", name="gsm8k")
    assert found == [422, "invalid_request", "name"] and "--interactions FILE" in told


async def test_a_start_that_fails_leaves_no_session():
    async with app_with(users.StartsNever, interaction_deadline_s=0.1) as client:
        assert (await refused(client, "/interaction/start"))[:2] == (424, "interaction_deadline")
        assert 'kind="interaction"} 0.0' in (await client.get("/metrics")).text
    assert users.counts() == {"start": 1, "finalise": 1}


SAID = {"role": "user", "content": "6 x 7?"}


async def test_messages_that_are_none_or_hold_no_answer_are_not_scored_and_use_up_no_turn():
    async with app_with(users.Noted) as client:
        one = {"interaction_id": (await post(client, "/interaction/start"))["interaction_id"]}
        for messages, told in (
            ([SAID], "messages: messages ends with a message of 'user'; the last is the assistant's"),
            ([{"role": "robot"}], "messages: messages[0].role is 'robot' (str); known: system, user,"),
            (
                [{"role": "user"}, MESSAGES[1]],
                "messages: messages[0].content is None (NoneType); it is a text",
            ),
            ([], ""),
            (None, ""),
            ([{"content": "no role"}], ""),
        ):
            answer = await refused(client, "/interaction/respond", **one, messages=messages)
            assert answer[:2] == (422, "invalid_request") and answer[2].startswith("messages")
            assert answer[3].startswith(told)
        assert (await post(client, "/interaction/respond", **one, messages=MESSAGES))["turn"] == 1


async def test_the_history_of_a_loop_with_tools_is_answered():
    call = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    called = {"role": "assistant", "content": None, "tool_calls": [call]}
    messages = [SAID, called, {"role": "tool", "content": "", "tool_call_id": "c1"}, MESSAGES[1]]
    async with app_with(users.Unscored) as client:
        one = {"interaction_id": (await post(client, "/interaction/start"))["interaction_id"]}
        answer = await post(client, "/interaction/respond", **one, messages=messages)
        assert (answer["turn"], answer["score"]) == (1, None)


async def test_an_interaction_that_is_asked_by_two_answers_one_after_the_other():
    async with app_with(users.Noted) as client:
        one = await post(client, "/interaction/start", ground_truth="x")
        body = {"interaction_id": one["interaction_id"], "messages": MESSAGES}
        found = await asyncio.gather(*(post(client, "/interaction/respond", **body) for _ in range(5)))
    assert sorted(answer["score"] for answer in found) == [1.0, 2.0, 3.0, 4.0, 5.0]
