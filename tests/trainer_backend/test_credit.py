"""What the keys of [algorithm] make of the same finished episodes, by hand."""

import pytest

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import UserReward
from tests.conftest import tiny_job
from tests.trainer_backend.dialogues import dialogue
from trainer_backend.credit import credits_of
from trainer_backend.errors import JobError
from trainer_backend.plugins import ESTIMATORS

TURN_SCORES = {"training__step_rewards_enabled": True, "training__step_rewards_mode": "env_sparse"}


def played(sibling, episode, keys=()):
    """A finished rollout; its decisions were made in states of those names."""
    steps = list(episode.steps)
    for t, key in enumerate(keys):
        seen = steps[t].observation_data.model_copy(update={"state_keys": {"default": key}})
        steps[t] = steps[t].model_copy(update={"observation_data": seen})
    return Rollout(
        rollout_id=f"r/{sibling}", run_id="r", iteration=1, group_id="g", sibling=sibling, attempt=0,
        instance_id="i", status="finished", trajectory=episode.model_copy(update={"steps": tuple(steps)}),
    )  # fmt: skip


def two_dialogues():
    """Both earned 1 in all: the first answered right in the end, the second was half right twice."""
    return [
        played(0, dialogue(0.0, 1.0), keys=("question", "after a wrong answer")),
        played(1, dialogue(0.5, 0.5), keys=("question", "after half an answer")),
    ]


def credits(rollouts, **algorithm):
    keys = {f"algorithm__{key}": value for key, value in algorithm.items()}
    return credits_of(tiny_job(**TURN_SCORES, **keys), rollouts)


GIGPO = {"advantage": "gigpo", "fnorm": "one", "gamma": 0.5, "omega": 0.5}


def test_episode_scores_are_outcomes_where_the_job_says_so_and_step_returns_come_from_the_rewards():
    # Outcomes 1 and 1/2: A_E = 1/4, -1/4. Returns 1/2, 1 and 3/4, 1/2 (gamma 1/2), of which the first meet in
    # one state: A_S = -1/8, 1/8, and 0 in states that nobody shares.
    first, second = credits(two_dialogues(), **GIGPO, episode_score="outcome")
    assert first.parts == {"episode_advantage": [0.25, 0.25], "step_advantage": [-0.125, 0.0]}
    assert second.parts == {"episode_advantage": [-0.25, -0.25], "step_advantage": [0.125, 0.0]}
    assert (first.advantages_T, second.advantages_T) == ([0.0625, 0.125], [-0.0625, -0.125])
    assert (first.rewards_T, second.rewards_T) == ([0.0, 1.0], [0.5, 0.5])
    for summed in (
        credits(two_dialogues(), **GIGPO),
        credits(two_dialogues(), **GIGPO, episode_score="rewards"),
    ):
        assert [item.parts["episode_advantage"] for item in summed] == [[0.0, 0.0]] * 2, "both sum to 1"


@pytest.mark.parametrize(("advantage", "expected"), [("grpo_no_std", 0.25), ("rloo", 0.5)])
def test_group_scores_are_outcomes_too(advantage, expected):
    first, second = credits(two_dialogues(), advantage=advantage, episode_score="outcome")
    assert (first.advantages_T, second.advantages_T) == ([expected] * 2, [-expected] * 2)


def test_the_outcome_is_the_score_of_a_reward_function_where_there_is_one():
    judged = []
    for rollout, score in zip(two_dialogues(), (3.0, 5.0), strict=True):
        said = UserReward(
            reward_function="f", result=EvaluateResult(score=score),
            environment_outcome_reward=rollout.trajectory.outcome_reward,
            environment_outcome_definition=rollout.trajectory.outcome_definition,
        )  # fmt: skip
        told = rollout.trajectory.model_copy(update={"outcome_reward": score, "user_reward": said})
        judged.append(rollout.model_copy(update={"trajectory": told}))
    first, second = credits(judged, advantage="grpo_no_std", episode_score="outcome")
    assert (first.advantages_T[0], second.advantages_T[0]) == (-1.0, 1.0)


def test_an_estimator_without_an_episode_score_refuses_the_key():
    readers = ", ".join(name for name, plug in ESTIMATORS.items() if "episode_score" in plug.takes)
    assert readers == "grpo, grpo_no_std, rloo, reinforce_pp_baseline, gigpo, gigpo_additive"
    with pytest.raises(
        JobError,
        match=f"algorithm.episode_score is not read by algorithm.advantage = 'stepwise'; known to: {readers}",
    ):
        tiny_job(algorithm__episode_score="outcome")
