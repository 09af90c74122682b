"""A finished rollout answers its request with finite numbers, or it is a failure where it arrives."""

from collections.abc import Callable
from typing import Any

import pytest

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.rollouts import Rollout, RolloutRequest
from shared_schemas.trajectory import ObservationData, StepData, UserReward
from tests.trainer_backend.collect.scripted_task_app import answer_to, make_request
from trainer_backend.collect.arrival import checked

REQUEST = make_request(3)
STEP = StepData(turn=1, observation_data=ObservationData(), action_taken={"type": "text"}, env_rewards=(1.0,))


def played(**changes: Any) -> Callable[[RolloutRequest], Rollout]:
    return lambda request: answer_to(request, **{"steps": (STEP,), **changes})


def scored(environments_own: float) -> UserReward:
    return UserReward(
        reward_function="f",
        result=EvaluateResult(score=1.0),
        environment_outcome_reward=environments_own,
        environment_outcome_definition="",
    )


def step(**changes: Any) -> tuple[StepData]:
    return (STEP.model_copy(update=changes),)


def test_an_honest_answer_stays_as_it_is():
    honest = played()(REQUEST)
    assert checked(REQUEST, honest) is honest


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (played(seed=4), "it was played in the world of seed 4; seed 3 was asked for"),
        (played(parent_rollout_id="x"), "it continues 'x'; None was asked for"),
        (lambda request: answer_to(make_request(4)), "its sibling is 4, and 3 was asked for"),
        (lambda request: played()(request).model_copy(update={"trajectory": None}), "it has no trajectory"),
        (played(outcome_reward=float("nan")), "its outcome_reward is nan, beyond +-1e+15"),
        (played(steps=step(env_rewards=(0.0, float("inf")))), "its env_reward at turn 1 is inf, beyond"),
        # Finite, and sums and squares of it are not.
        (played(outcome_reward=-1e308), "its outcome_reward is -1e+308, beyond"),
        (played(user_reward=scored(float("nan"))), "its environment_outcome_reward is nan"),
        (played(steps=step(base_reward=float("nan"))), "its base_reward at turn 1"),
        (played(steps=step(policy_value_estimate=float("nan"))), "its policy_value_estimate at turn 1"),
    ],
)
def test_another_or_a_broken_episode_is_a_failure_that_says_why(answer: Any, told: str):
    found = checked(REQUEST, answer(REQUEST))
    assert (found.status, found.trajectory) == ("failed", None)
    assert found.failure is not None and told in found.failure.detail
    assert (found.failure.code, found.failure.recurs) == ("wrong_rollout", False)
