"""`@reward_function` as its author meets it: called like a function, refused where it cannot work."""

import asyncio

import pytest

from task_app.protocols import RewardFunction
from task_app.reward_functions import EvaluateResult, Message, MetricResult, StepOutput, reward_function

TALK = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]


@reward_function
def right(messages, ground_truth=None, **kwargs):
    """Is the last word the truth?"""
    return EvaluateResult(score=float(messages[-1].content == ground_truth))


def test_messages_may_be_given_as_json_and_arrive_as_messages():
    assert right(messages=TALK, ground_truth="4").score == 1.0
    assert right(messages=[Message(role="assistant", content="5")], ground_truth="4").score == 0.0


def test_a_decorated_function_is_what_the_plug_board_takes_and_keeps_its_name():
    assert isinstance(right, RewardFunction)
    assert (right.__name__, right.mode) == ("right", "pointwise")
    assert right.__doc__ == "Is the last word the truth?"


def test_an_async_batch_answers_once_it_is_awaited():
    @reward_function(mode="batch")
    async def lengths(rollouts_messages, **kwargs):
        return [{"score": len(messages)} for messages in rollouts_messages]

    found = asyncio.run(lengths(rollouts_messages=[TALK, TALK[:1]]))
    assert [result.score for result in found] == [2.0, 1.0]


def test_the_published_fields_are_there():
    metrics = {"found": MetricResult(is_score_valid=True, score=1.0, reason="yes")}
    output = StepOutput(step_index="0", base_reward=0.5, metrics=metrics, reason="good")
    result = EvaluateResult(
        score=0.5, is_score_valid=True, reason="r", metrics=metrics, step_outputs=(output,), error=None
    )
    assert EvaluateResult.model_validate_json(result.model_dump_json()) == result


def answering(answer, mode="pointwise"):
    @reward_function(mode=mode)
    def given(**kwargs):
        return answer

    return given


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (None, "returned None; EvaluateResult"),
        (0.5, "returned the float 0.5; EvaluateResult(score=...) is needed"),
        ("good", "returned a str; EvaluateResult"),
        ({"scor": 1}, "returned a dict that is no EvaluateResult: score: Field required"),
        ({"score": float("inf")}, "score: a reward is inf; it must be a finite number"),
        ({"score": 1, "step_outputs": [{"step_index": 0, "base_reward": float("nan")}]}, "0.base_reward: "),
    ],
)
def test_an_answer_that_is_none_says_what_was_found(answer, told):
    with pytest.raises(TypeError) as caught:
        answering(answer)(messages=TALK)
    assert told in str(caught.value)


def test_a_batch_answers_for_every_episode():
    with pytest.raises(TypeError, match="1 results for 2"):
        answering([{"score": 1}], "batch")(rollouts_messages=[TALK, TALK])
    with pytest.raises(TypeError, match="episode 1 the int 3"):
        answering([{"score": 1}, 3], "batch")(rollouts_messages=[TALK, TALK])
    with pytest.raises(TypeError, match="a dict; a list"):
        answering({"score": 1}, "batch")(rollouts_messages=[TALK])
    with pytest.raises(TypeError, match="rollouts_messages="):
        answering([], "batch")(messages=TALK)


def test_a_function_that_one_fact_more_would_break_is_refused_where_it_is_written():
    with pytest.raises(ValueError, match=r"'strict' .*\*\*kwargs"):

        @reward_function
        def strict(messages, ground_truth=None):
            return EvaluateResult(score=0.0)

    with pytest.raises(ValueError, match="'batched'; known: pointwise, batch"):
        reward_function(mode="batched")
