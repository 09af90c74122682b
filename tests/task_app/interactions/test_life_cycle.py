"""Every answer scored, every instance finalised exactly once, and what classes may return."""

import asyncio
import math
import threading
from contextlib import suppress

import numpy as np
import pytest
from structlog.testing import capture_logs

from service_kit.logs import configure_logs
from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.errors import CapacityReached, InteractionFailed, InvalidRequest, UnknownName
from task_app.interactions.live import (
    Calls,
    InteractionReply,
    loop_in_thread,
    read_instance_id,
    read_reply,
    read_score,
)
from task_app.plugins import InteractionEntry
from tests.task_app.interactions import users
from tests.task_app.interactions.opening import entered, interactions, said


async def answered(room, name=None):
    async with room.open(name, {}, rollout_id="r1") as live:
        await live.respond(said("a"))


async def test_every_answer_is_scored_and_the_instance_finalised_once():
    room = interactions(users.Noted)
    async with room.open("noted", {"query": "q"}, rollout_id="r1", ground_truth="42") as live:
        replies = [await live.respond(said("a")), await live.respond(said("a", "b"))]
        assert await live.score() == 2.0
        assert len(room) == 1
    assert [(one.response, one.score) for one in replies] == [("turn 1 of 42", 1.0), ("turn 2 of 42", 2.0)]
    assert all(type(one.score) is float for one in replies)
    assert [what for what, _ in users.BOOK] == ["start", "finalise"]
    assert len({instance_id for _, instance_id in users.BOOK}) == 1
    assert users.BOOK[0][1].startswith("r1/")
    assert len(room) == 0


async def test_start_answer_score_and_end_have_a_debug_line_each_and_none_tells_what_was_said():
    configure_logs("debug")
    room = interactions(users.Noted)
    with capture_logs() as lines:
        async with room.open("noted", {"query": "q"}, rollout_id="r1", ground_truth="42") as live:
            await live.respond(said("a secret"))
    told = [
        (line["event"], line["log_level"], line["interaction"], line["instance_id"][:3]) for line in lines
    ]
    events = ["started", "answered", "scored", "finalised"]
    assert told == [(f"interaction_{event}", "debug", "noted", "r1/") for event in events]
    assert (lines[1]["should_terminate"], lines[2]["score"]) == (False, 1.0)
    assert "secret" not in str(lines) and "42" not in str([line | {"instance_id": ""} for line in lines])


async def test_an_error_of_the_episode_finalises_too():
    room = interactions(users.Noted)
    with pytest.raises(ZeroDivisionError):
        async with room.open("noted", {}, rollout_id="r1"):
            1 / 0  # noqa: B018
    assert users.counts() == {"start": 1, "finalise": 1}


async def test_closing_twice_finalises_once():
    room = interactions(users.Noted)
    live = room.live("noted", {}, rollout_id="r1")
    await live.start()
    await asyncio.gather(live.close(), live.close())
    assert users.counts() == {"start": 1, "finalise": 1}


@pytest.mark.parametrize(
    ("what", "told"),
    [
        ("key", "raised KeyError: 'no such thing'"),
        ("exit", "raised SystemExit: no such thing"),
        ("cancel", "raised CancelledError: no such thing"),
        ("time", "raised TimeoutError: no such thing"),
    ],
)
@pytest.mark.parametrize("where", ["start", "respond"])
async def test_whatever_a_class_raises_fails_its_own_episode_and_finalises(where, what, told):
    room = interactions(users.Raises, config={"where": where, "what": what})
    with pytest.raises(InteractionFailed) as failed:
        await answered(room, "raises")
    assert failed.value.code == "interaction_failed"
    assert failed.value.detail.startswith("interaction 'raises': ")
    assert f"{told} (users.py:" in failed.value.detail
    assert users.counts()["finalise"] == 1
    assert len(room) == 0


async def test_a_finalise_that_raises_costs_no_episode():
    room = interactions(users.Raises, config={"where": "finalise", "what": "exit"})
    await answered(room, "raises")
    assert users.counts() == {"start": 1, "finalise": 1}
    assert len(room) == 0


@pytest.mark.parametrize("kind", [users.StartsNever, users.Waits])
async def test_what_waits_for_ever_meets_the_deadline_and_is_finalised(kind):
    room = interactions(kind, interaction_deadline_s=0.2)
    with pytest.raises(InteractionFailed, match=r"gave no answer within 0\.2 s") as failed:
        await answered(room)
    assert failed.value.code == "interaction_deadline"
    assert users.counts() == {"start": 1, "finalise": 1}


@pytest.mark.parametrize("kind", [users.StartsLate, users.StartsNever, users.Waits])
async def test_a_cancel_while_it_starts_or_answers_finalises_it_once_and_after_its_start(kind):
    room = interactions(kind, interaction_deadline_s=20.0)
    playing = asyncio.create_task(answered(room))
    await entered(users.ENTERED)
    playing.cancel()
    users.LET_GO.set()
    with pytest.raises(asyncio.CancelledError):
        await playing
    await room.close()
    assert [what for what, _ in users.BOOK] == ["start", "finalise"]
    assert len(room) == 0


async def test_a_cancel_before_the_start_ran_owes_nothing():
    room = interactions(users.Noted)
    playing = asyncio.create_task(answered(room))
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert users.BOOK == []


async def test_a_second_cancel_while_it_is_finalised_changes_nothing():
    room = interactions(users.Blocks, interaction_deadline_s=20.0)
    playing = asyncio.create_task(answered(room))
    await entered(users.ENTERED)
    playing.cancel()
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert users.counts() == {"start": 1}
    users.LET_GO.set()
    await room.close()
    assert users.counts() == {"start": 1, "finalise": 1}


async def test_one_that_blocks_its_thread_stalls_no_other_and_is_finalised_when_it_lets_go():
    room = interactions(users.Blocks, users.Noted, interaction_deadline_s=0.2, max_plugin_threads=1)
    with pytest.raises(InteractionFailed, match=r"within 0\.2 s"):
        async with room.open("blocks", {}, rollout_id="r1") as blocking:
            waiting = asyncio.create_task(blocking.respond(said("a")))
            await entered(users.ENTERED)
            async with room.open("noted", {}, rollout_id="r2") as live:
                assert (await live.respond(said("a"))).score == 1.0
            await waiting
    assert blocking.hangs and len(room) == 1
    with pytest.raises(CapacityReached, match="1 interactions hang"):
        room.live("noted", {}, rollout_id="r3")
    users.LET_GO.set()
    while len(room):
        await asyncio.sleep(0)
    assert users.counts() == {"start": 2, "finalise": 2}


async def test_a_class_may_leave_the_id_out_where_the_published_base_does():
    async with interactions(users.ReadOnly).open(None, {}, rollout_id="r1") as live:
        assert await live.score() == 1.0
    assert users.BOOK[-1] == ("finalise", "?")


async def test_what_a_class_opens_on_its_loop_lives_from_call_to_call():
    async with interactions(users.Held).open(None, {}, rollout_id="r1") as live:
        for text in ("x", "y", "z"):
            assert (await live.respond(said(text))).response == f"you said {text}"


async def test_a_class_gets_copies_and_content_is_always_text():
    call = ToolCall(id="c", function=FunctionCall(name="f", arguments="{}"))
    messages = [
        Message(role="user", content="q"),
        Message(role="assistant", content=None, tool_calls=(call,)),
    ]
    async with interactions(users.Spoils).open(None, {"list": [1]}, rollout_id="r1") as live:
        for _ in range(2):
            reply = await live.respond(messages)
            assert reply.metadata == {
                "found": [["user", "q"], ["assistant", ""]],
                "list": 2,
                "thread": "{1, 2}",
            }
    assert len(messages) == 2


async def test_two_hundred_episodes_at_once_have_ids_and_rows_of_their_own():
    room = interactions(users.OfTheClass, interaction_deadline_s=60.0)
    everybody = asyncio.Barrier(200)

    async def episode(number):
        async with room.open(None, {"query": f"q{number}"}, rollout_id=f"r{number}") as live:
            await everybody.wait()
            return [(await live.respond(said("a"))).response for _ in range(2)]

    found = await asyncio.gather(*map(episode, range(200)))
    assert found == [[f"r{number} asked q{number}"] * 2 for number in range(200)]
    assert users.counts() == {"start": 200, "finalise": 200}
    assert len({instance_id for _, instance_id in users.BOOK}) == 200
    assert len(room) == 0


async def test_the_names_are_those_of_the_file():
    room = interactions(users.Noted, users.Waits)
    with pytest.raises(
        UnknownName, match=r"unknown interaction 'notd'\. Did you mean 'noted'\? Known: noted, waits"
    ):
        room.entry("notd")
    with pytest.raises(InvalidRequest, match="2: noted, waits"):
        room.entry(None, where="interaction.")
    with pytest.raises(InvalidRequest, match="no interactions"):
        interactions().entry("noted")
    assert interactions(users.Noted).entry(None).name == "noted"


async def test_a_call_after_the_end_is_refused_at_once_and_not_at_its_deadline():
    calls = Calls(InteractionEntry("noted", users.Noted, {}), "r", {}, context=None, at_most_bytes=1_024)
    await calls.start()
    await calls.finalise(within_s=1.0)
    # Finalising keeps the turn, so a call that waited for it would wait for ever.
    async with asyncio.timeout(20.0):
        for late in (calls.respond([]), calls.score(), calls.start()):
            with pytest.raises(InteractionFailed, match="'noted' is finalised"):
                await late


def read(*parts, at_most_bytes=1_000):
    return read_reply(parts, name="x", at_most_bytes=at_most_bytes)


def test_the_four_parts_are_taken():
    assert read(False, "go on", 0.5, {"a": [1]}) == InteractionReply(False, "go on", 0.5, {"a": [1]})
    assert read(True, None, None, None) == InteractionReply(True, "", None, {})
    assert read(np.True_, "", np.float32(0.5), {}) == InteractionReply(True, "", 0.5, {})
    # Half a character is replaced.
    assert read(False, "a\ud83d", 0.0, {"b": "\ud83d"}) == InteractionReply(False, "a?", 0.0, {"b": "?"})


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (math.nan, "nan"), (math.inf, "inf"), ("0.5", "'0.5'"), ([1.0], "a list of 1"), ({}, "a dict"),
        (np.zeros(2), "a ndarray"), (10**400, "10000"), (1j, "a complex"),
    ],
)  # fmt: skip
def test_a_score_is_made_a_float_and_what_is_no_finite_number_is_refused(found, told):
    for number in (0, True, np.int64(1), np.array(0.25)):
        score = read_score(number, where="x")
        assert (score, type(score)) == (number, float)
    with pytest.raises(InteractionFailed, match="as the score") as refused:
        read_score(found, where="interaction 'x': generate_response")
    assert refused.value.detail.startswith(f"interaction 'x': generate_response returned {told}")


@pytest.mark.parametrize(
    ("reply", "told"),
    [
        (None, "returned None; (should_terminate, response, score, metadata) is needed"),
        ("four", "returned 'four'; (should_terminate"),
        ([False, "x", 0.0], "returned a tuple of 3; (should_terminate"),
        (["False", "x", 0.0, {}], "returned 'False' as should_terminate; a bool is needed"),
        ([1, "x", 0.0, {}], "returned 1 as should_terminate"),
        ([False, None, 0.0, {}], "returned None as the response; text is needed"),
        ([True, 7, 0.0, {}], "returned 7 as the response"),
        ([False, "x", "y", {}], "returned 'y' as the score"),
        ([False, "x", 0.0, [1]], "returned a list of 1 as metadata; a dict is needed"),
        ([False, "x" * 2_000, 0.0, {}], "returned 2002 bytes; at most 1024 are allowed"),
    ],
)
async def test_a_wrong_type_fails_the_episode_with_its_place_and_is_finalised(reply, told):
    room = interactions(users.Says, config={"reply": reply}, max_interaction_bytes=1_024)
    with pytest.raises(InteractionFailed) as failed:
        async with room.open(None, {}, rollout_id="r") as live:
            await live.respond(said("a"))
    assert failed.value.detail.startswith("interaction 'says': generate_response " + told[:40])
    assert told in failed.value.detail
    assert users.counts() == {"start": 1, "finalise": 1}


def test_metadata_that_is_no_json_stands_there_as_it_prints():
    assert read(False, "x", 0.0, {"array": np.zeros(1), 3: {"b": math.nan}}).metadata == {
        "array": [0.0],
        "3": {"b": "NaN"},
    }
    circle: dict = {}
    circle["again"] = circle
    with pytest.raises(InteractionFailed, match="metadata that is no JSON"):
        read(False, "x", 0.0, circle)


def test_an_instance_id_may_be_the_classs_own():
    assert read_instance_id("own", "given", name="x") == "own"
    assert read_instance_id(None, "given", name="x") == "given"
    with pytest.raises(InteractionFailed, match="start_interaction returned 7"):
        read_instance_id(7, "given", name="x")


def test_a_task_that_ignores_its_cancellation_keeps_no_thread():
    loop, begun = loop_in_thread("stubborn"), threading.Event()

    async def stay() -> None:
        begun.set()
        while True:
            with suppress(asyncio.CancelledError):
                await asyncio.sleep(3600)

    asyncio.run_coroutine_threadsafe(stay(), loop)
    begun.wait()
    (thread,) = (one for one in threading.enumerate() if one.name == "stubborn")
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    assert loop.is_closed()
