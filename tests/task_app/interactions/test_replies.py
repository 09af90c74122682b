"""What classes return: what is taken of it, and what is refused, with its place."""

import math

import numpy as np
import pytest

from task_app.errors import InteractionFailed
from task_app.interactions.live import InteractionReply, read_instance_id, read_reply, read_score
from tests.task_app.interactions import users
from tests.task_app.interactions.opening import interactions, said


def read(*parts, at_most_bytes=1_000):
    return read_reply(parts, name="x", at_most_bytes=at_most_bytes)


def test_the_four_parts_are_taken():
    assert read(False, "go on", 0.5, {"a": [1]}) == InteractionReply(False, "go on", 0.5, {"a": [1]})
    assert read(True, None, None, None) == InteractionReply(True, "", None, {})
    assert read(np.True_, "", np.float32(0.5), {}) == InteractionReply(True, "", 0.5, {})


@pytest.mark.parametrize(
    ("found", "score"), [(0, 0.0), (True, 1.0), (np.int64(2), 2.0), (np.array(0.25), 0.25)]
)
def test_a_score_is_made_a_float(found, score):
    assert read_score(found, where="x") == score
    assert type(read_score(found, where="x")) is float


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (math.nan, "nan"), (math.inf, "inf"), ("0.5", "'0.5'"), ([1.0], "a list of 1"), ({}, "a dict"),
        (np.zeros(2), "a ndarray"), (10**400, "10000"), (1j, "a complex"),
    ],
)  # fmt: skip
def test_what_is_no_finite_number_is_refused(found, told):
    with pytest.raises(InteractionFailed, match="as the score; a finite number is needed") as refused:
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


def test_half_a_character_is_replaced_in_text():
    assert read(False, "a\ud83d", 0.0, {"b": "\ud83d"}) == InteractionReply(False, "a?", 0.0, {"b": "?"})


def test_an_instance_id_may_be_the_classs_own():
    assert read_instance_id("own", "given", name="x") == "own"
    assert read_instance_id(None, "given", name="x") == "given"
    with pytest.raises(InteractionFailed, match="start_interaction returned 7; an instance_id is needed"):
        read_instance_id(7, "given", name="x")
