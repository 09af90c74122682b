"""`@reward_function`, and its step_outputs as base_reward and reward parts of the decisions, by hand."""

import pytest
from pydantic import ValidationError

from shared_schemas.trajectory import ObservationData, RewardPart, StepData, StopReason, Trajectory
from task_app.errors import RewardFunctionFailed
from task_app.reward_functions import EvaluateResult, Message, MetricResult, StepOutput, reward_function
from task_app.reward_functions.alignment import (
    align_data_for_rl_processing,
    build_arguments,
    with_user_reward,
)

PENALTY = RewardPart(source="penalty", value=-1.0)


def steps(count, **fields):
    return [
        StepData(
            turn=t + 1, observation_data=ObservationData(), action_taken={}, env_rewards=(float(t),), **fields
        )
        for t in range(count)
    ]


def said(*outputs, **fields):
    listed = tuple(StepOutput(step_index=index, base_reward=reward) for index, reward in outputs)
    return EvaluateResult(score=0.5, step_outputs=listed, **fields)


def episode(count):
    return Trajectory(
        env_name="e", policy_name="p", seed=3, steps=tuple(steps(count)), outcome_reward=7.0,
        outcome_definition="seven", env_steps=count, terminated=True, truncated=False,
        stop_reason=StopReason.ENVIRONMENT_DONE, wall_s=0.0, warnings=("old",),
    )  # fmt: skip


def test_each_base_reward_is_added_to_what_its_decision_had():
    found, warnings = align_data_for_rl_processing(
        said((1, 0.25), ("0", -2.0)), steps(2, reward_parts=(PENALTY,)), "r"
    )
    assert [step.base_reward for step in found] == [-2.0, 0.25]
    assert [step.reward_parts for step in found] == [
        (PENALTY, RewardPart(source="user", value=-2.0)),
        (PENALTY, RewardPart(source="user", value=0.25)),
    ]
    assert warnings == []


def test_a_function_that_says_nothing_of_steps_changes_none():
    before = steps(3)
    assert align_data_for_rl_processing(EvaluateResult(score=1.0), before, "r") == (before, [])


def test_what_does_not_fit_is_told_once_for_each_kind():
    outputs = said((0, 1.0), (0, 2.0), (0, 3.0), (4, 9.0), (-1, 9.0), ("last", 9.0))
    found, warnings = align_data_for_rl_processing(outputs, steps(3), "run/7")
    assert [step.base_reward for step in found] == [3.0, None, None], "the last of one index counts"
    assert [step.reward_parts for step in found][1:] == [(), ()]
    assert warnings == [
        "run/7: step_outputs name a step more than once, and the last one counts: 0",
        "run/7: step_outputs name steps that are not there (this episode has 0..2), and are not used: "
        "4, -1, 'last'",
        "run/7: steps have no step_output, and no base_reward: 1, 2",
    ]
    digits, long = align_data_for_rl_processing(said(("1" * 200, 1.0)), steps(100), "r")[1]
    assert "are not used: '111" in digits
    assert long.endswith("0, 1, 2, 3, 4 and 95 more")


@pytest.mark.parametrize("index", [True, 2.0, "1" * 4_301])
def test_an_index_that_is_no_whole_number_or_too_long_is_refused_where_it_is_made(index):
    with pytest.raises(ValidationError, match="step_index"):
        StepOutput(step_index=index, base_reward=1.0)


def test_the_score_becomes_the_outcome_and_the_environments_own_is_kept():
    result = said((0, 1.0), (1, 0.0), reason="half \ud83d")
    judged = with_user_reward(episode(2), result, name="mine", rollout_id="r")
    assert (judged.outcome_reward, judged.outcome_definition) == (0.5, "score of the reward function 'mine'")
    told = judged.user_reward
    assert told is not None
    assert (told.environment_outcome_reward, told.environment_outcome_definition) == (7.0, "seven")
    assert (told.reward_function, told.result.reason) == ("mine", "half ?")
    assert judged.warnings == ("old",)
    assert [step.env_rewards for step in judged.steps] == [(0.0,), (1.0,)]
    judged.model_dump_json()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"error": "judge is down"}, "reward function 'mine' reports an error: judge is down"),
        (
            {"is_score_valid": False, "reason": "no answer found"},
            "reward function 'mine' says that its score is not valid: no answer found",
        ),
        ({"is_score_valid": False}, "says that its score is not valid: no reason given"),
    ],
)
def test_a_score_that_its_own_function_disowns_is_a_failure_and_no_reward(fields, told):
    with pytest.raises(RewardFunctionFailed) as caught:
        with_user_reward(episode(1), EvaluateResult(score=0.0, **fields), name="mine", rollout_id="r")
    assert told in caught.value.detail


def test_a_function_is_given_facts_that_json_can_hold():
    given = build_arguments(episode(2), [], {"answer": 4}, rollout_id="r")
    assert given == {
        "messages": [],
        "ground_truth": {"answer": 4},
        "rollout_id": "r",
        "env_name": "e",
        "seed": 3,
        "stop_reason": "environment_done",
        "environment_outcome_reward": 7.0,
        "env_rewards": [[0.0], [1.0]],
    }


TALK = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]


@reward_function
def right(messages, ground_truth=None, **kwargs):
    """Is the last word the truth?"""
    return EvaluateResult(score=float(messages[-1].content == ground_truth))


def test_messages_may_be_given_as_json_and_arrive_as_messages():
    assert right(messages=TALK, ground_truth="4").score == 1.0
    assert right(messages=[Message(role="assistant", content="5")], ground_truth="4").score == 0.0
    assert (right.__name__, right.__doc__) == ("right", "Is the last word the truth?")


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
