"""Segments of an episode, their experts and bytes, and the views that answers were sampled from."""

import math
from base64 import b64encode

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from shared_schemas.trajectory import ObservationData, PolicyLogprobs, Sampling, StepData
from trainer_backend.core.columns import decoded, encoded
from trainer_backend.core.emission_views import assistant_turn_boundaries, emission_views
from trainer_backend.core.experts import UNKNOWN, ExpertColumns, write_experts
from trainer_backend.core.segments import SPAN, Segment, build_segments
from trainer_backend.errors import SegmentError


def step(turn, reused, prompt, response, *, temperature=1.0, **changes):
    call = {
        "prompt_ids_reused": reused,
        "prompt_token_ids": tuple(prompt),
        "token_ids": tuple(response),
        "logprobs": tuple(-0.5 for _ in response),
        "finish_reason": "stop",
        "versions": ((0, 3),) if response else (),
    }
    return StepData(
        turn=turn,
        observation_data=ObservationData(),
        action_taken={"type": "text"},
        policy_name="openai",
        sampling=Sampling(temperature=temperature),
        policy_logprobs=PolicyLogprobs(**(call | changes)),
    )


def test_decisions_that_continue_each_other_share_a_segment():
    # prompt 1 2, answer 3 4; then 5 is appended, answer 6
    [segment] = build_segments(
        [
            step(1, 0, [1, 2], [3, 4], logprobs=(-0.5, -0.25)),
            step(2, 4, [5], [6], temperature=0.5, logprobs=(-0.125,), versions=((0, 4),)),
        ],
        rollout_id="r",
    )
    assert segment.rollout_id == "r"
    assert segment.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
    assert segment.decision.tolist() == [0, 0, 1]
    assert segment.sampled_positions.tolist() == [2, 3, 5]
    assert segment.logprobs.tolist() == [-0.5, -0.25, -0.125]
    assert segment.versions.tolist() == [3, 3, 4]
    assert segment.temperatures.tolist() == [1.0, 1.0, 0.5]
    assert len(segment) == 6


def test_where_the_prefix_breaks_the_reused_answer_becomes_context():
    # the second prompt keeps 1 2 3 of [1 2 3 4] and drops the last sampled token
    segments = build_segments([step(1, 0, [1, 2], [3, 4]), step(2, 3, [7], [8])], rollout_id="r")
    assert [segment.token_ids.tolist() for segment in segments] == [[1, 2, 3, 4], [1, 2, 3, 7, 8]]
    assert [segment.spans.tolist() for segment in segments] == [[(2, 4, 0, 3, 1.0)], [(4, 5, 1, 3, 1.0)]]
    assert segments[1].logprobs.tolist() == [-0.5]


def test_a_completion_that_spans_a_weight_swap_keeps_the_version_of_each_token():
    [segment] = build_segments([step(1, 0, [1], [2, 3, 4], versions=((0, 5), (2, 6)))], rollout_id="r")
    assert segment.versions.tolist() == [5, 5, 6]


@pytest.mark.parametrize(
    ("steps", "token_ids"),
    [
        ([step(1, 0, [1], []), step(2, 0, [2], [3])], [[2, 3]]),
        ([step(1, 0, [1], []), step(2, 1, [2], [3])], [[1, 2, 3]]),
        ([step(1, 0, [1], [], versions=((0, 3),))], []),  # the version that gave none
    ],
)
def test_without_a_sampled_token_there_is_no_segment_and_a_decision_without_can_be_continued(
    steps, token_ids
):
    segments = build_segments(steps, rollout_id="r")
    assert [segment.token_ids.tolist() for segment in segments] == token_ids


@st.composite
def conversations(draw):
    """Steps with any reuse, and the exact view and answer of each."""
    ids = st.lists(st.integers(0, 9), min_size=1, max_size=4)
    steps, views, full = [], [], []
    for turn in range(1, draw(st.integers(1, 6)) + 1):
        reused = draw(st.sampled_from([0, len(full) // 2, max(len(full) - 1, 0), len(full)]))
        prompt, answer = draw(ids), draw(ids)
        steps.append(step(turn, reused, prompt, answer))
        views.append((full[:reused] + prompt, answer))
        full = full[:reused] + prompt + answer
    return steps, views


@given(conversations())
def test_every_sampled_token_is_trained_once_on_the_view_it_was_sampled_from(conversation):
    steps, expected = conversation
    segments = build_segments(steps, rollout_id="r")
    views = emission_views(segments)
    assert [(list(view.prompt_ids), list(view.answer_ids)) for view in views] == expected
    assert [view.turn for view in views] == [step.turn for step in steps]
    for number, segment in enumerate(segments):
        trained = [i for view in views if view.segment == number for i in range(view.start, view.end)]
        assert trained == segment.sampled_positions.tolist()


@pytest.mark.parametrize(
    ("second", "message"),
    [
        (step(2, 4, [5], [6]), "turn 2: reuses 4 ids of the previous prompt and response, which have 3"),
        (step(2, 3, [5], [6], logprobs=()), "turn 2: 1 token_ids but 0 logprobs"),
        (step(2, 3, [5], [6, 7], logprobs=(-1.0, math.nan)), "turn 2, token 1: .* log-prob is nan"),
        (step(2, 3, [5], [6], logprobs=(-math.inf,)), "turn 2, token 0: the sampler's log-prob is -inf"),
        (step(2, 0, [], [6]), "turn 2: an empty prompt; nothing predicts"),
        (step(2, 3, [5], [6], versions=()), r"turn 2: versions start at tokens \[\]; expected 0 first"),
        (step(2, 3, [5], [6], versions=((1, 3),)), r"turn 2: versions start at tokens \[1\]"),
        (step(2, 3, [5], [6], versions=((0, 3), (1, 4))), r"turn 2: versions .*\[0, 1\]; .* below 1"),
        (step(2, 3, [5], [6, 7], versions=((0, 3), (0, 4))), r"turn 2: versions .*\[0, 0\]"),
        (step(2, 3, [5], [], versions=((1, 3),)), r"turn 2: versions .*\[1\]"),
        (step(2, 3, [5], [6, 7], versions=((0, 3), (1, -4))), "turn 2: versions name -4"),
        (step(2, 3, [5], [6], temperature=0.0), "turn 2: temperature 0"),
        (step(2, 3, [5], [6]).model_copy(update={"sampling": None}), "turn 2: no sampling"),
        (
            step(2, 3, [5], [6]).model_copy(update={"policy_logprobs": None, "policy_name": "teacher"}),
            "turn 2: no exact tokens: policy 'teacher' samples no tokens",
        ),
    ],
)
def test_tokens_that_do_not_fit_together_are_refused_with_rollout_and_turn(second, message):
    with pytest.raises(SegmentError, match=f"^rollout r-1, {message}"):
        build_segments([step(1, 0, [1, 2], [3]), second], rollout_id="r-1")


def experts(first: int, *tokens: list[int]) -> dict[str, object]:
    return {"experts": write_experts(np.array(tokens, np.uint16), first)}


def test_a_segment_has_the_experts_of_each_token_where_a_call_names_them():
    # prompt 1 2, answer 3 4, experts of 1 to 3; then 5 and 6 behind 3: those of 5 alone
    first, second = build_segments(
        [
            step(1, 0, [1, 2], [3, 4], **experts(0, [7, 0], [8, 1], [9, 2])),
            step(2, 3, [5], [6], **experts(3, [300, 4])),
        ],
        rollout_id="r",
    )
    assert first.experts.tolist() == [7, 0, 8, 1, 9, 2, UNKNOWN, UNKNOWN]
    assert second.experts.tolist() == [7, 0, 8, 1, 9, 2, 300, 4, UNKNOWN, UNKNOWN]
    (plain,) = build_segments([step(1, 0, [1], [2])], rollout_id="r")
    assert len(plain.experts) == 0


def test_experts_below_255_are_written_as_bytes_and_the_byte_255_means_unknown():
    narrow, wide = (experts(0, [number, 0])["experts"] for number in (254, 255))
    assert [named["number_bytes"] for named in (narrow, wide)] == [1, 2]
    partly = narrow | {"data": b64encode(bytes([255, 254])).decode()}
    for named, numbers in ((narrow, [254, 0]), (wide, [255, 0]), (partly, [UNKNOWN, 254])):
        (found,) = build_segments([step(1, 0, [1], [2], experts=named)], rollout_id="r")
        assert found.experts.tolist() == [*numbers, UNKNOWN, UNKNOWN]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"first": 4}, "but the call has 4"),
        ({"data": "AAAA"}, "no base64 of 2 numbers a token"),  # three bytes
        ({"data": "?"}, "no base64"),
        ({"per_token": 1}, "experts of .1, 2. numbers per token"),
    ],
)
def test_experts_that_fit_no_token_are_refused(change, reason):
    named = experts(2, [5, 6])["experts"]
    steps = [
        step(1, 0, [1, 2], [], experts=experts(0, [1, 2])["experts"]),
        step(2, 2, [3], [4], experts=named | change),
    ]
    with pytest.raises(SegmentError, match=reason):
        build_segments(steps, rollout_id="r")


def test_answers_that_follow_without_a_token_between_them_stay_two():
    [segment] = build_segments([step(1, 0, [1], [2]), step(2, 2, [], [3])], rollout_id="r")
    assert list(assistant_turn_boundaries(segment)) == [(0, 1, 2), (1, 2, 3)]


COLUMNS, SEGMENTS = TypeAdapter(ExpertColumns), TypeAdapter(list[Segment])


@pytest.mark.parametrize("ids", [[[0, 3], [254, 1]], [[0, 300], [UNKNOWN, 2]]], ids=["a byte each", "two"])
def test_columns_come_out_of_json_as_they_went_in(ids: list[list[int]]):
    found = COLUMNS.validate_json(COLUMNS.dump_json(np.array(ids, np.uint16)))
    assert found.dtype == np.uint16 and found.tolist() == ids


@pytest.mark.parametrize(
    "data", ["AQI", "AQI=", "!"], ids=["no base64", "three numbers of two", "no text of it"]
)
def test_columns_that_are_no_whole_tokens_are_a_wrong_field(data: str):
    with pytest.raises(ValidationError, match="base64 of 3 numbers a token"):
        COLUMNS.validate_python({"first": 0, "per_token": 3, "number_bytes": 1, "data": data})


def test_segments_come_back_bit_for_bit_and_cost_their_arrays_and_a_line():
    logprobs = [-0.1, -math.inf, math.nan, -5e-324]
    parts = [
        Segment.of("a/1", [2**31 - 1, -1, 3, 4, 5, 6, 7], logprobs, [(1, 3, 0, 7, 0.1), (4, 6, 1, 8, 1.0)]),
        Segment.of("b", [1], [], []),
    ]
    body = encoded(SEGMENTS, parts)
    again = decoded(SEGMENTS, body)
    for name in ("token_ids", "logprobs", "spans"):
        for part, other in zip(parts, again, strict=True):
            column, found = getattr(part, name), getattr(other, name)
            assert (found.dtype, found.tobytes()) == (column.dtype, column.tobytes())
            assert found.flags.aligned and not found.flags.writeable
    assert [part.rollout_id for part in again] == ["a/1", "b"]
    # 7 and 1 ids, 4 log-probs and 2 spans, each array filled up to 8 bytes
    assert len(body) - (body.index(b"\n") + 1) == 32 + 8 + 4 * 8 + 2 * SPAN.itemsize
    assert encoded(SEGMENTS, again) == body


@pytest.mark.parametrize("place", ["[8, 1]", "[-4, 1]", "[0, -1]", "[0, 3]", "[0]", "7"])
def test_an_array_that_does_not_lie_in_the_bytes_is_refused(place):
    body = b'[{"rollout_id": "r", "token_ids": %s, "logprobs": [0, 0], "spans": [0, 0]}]\n' % place.encode()
    with pytest.raises(ValidationError, match="token_ids"):
        decoded(SEGMENTS, body + bytes(8))


def test_an_array_of_another_kind_is_not_sent():
    part = Segment("r", np.array([1, 2]), np.array([-1.0]), np.array([(1, 2, 0, 0, 1.0)], SPAN))
    with pytest.raises(Exception, match="int64; expected 1, int32"):
        encoded(SEGMENTS, [part])
