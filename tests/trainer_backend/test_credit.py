"""What the keys of [algorithm] make of the same finished episodes, by hand."""

import pytest

from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import PolicyLogprobs, Sampling, StepMetadata, StopReason, UserReward
from tests.conftest import tiny_job
from tests.trainer_backend.dialogues import dialogue
from tests.trainer_backend.pages import hand_made
from trainer_backend import job_parts
from trainer_backend.core.critic import ByToken
from trainer_backend.core.kl_reward import ScoredTokens
from trainer_backend.core.statistics import step_deltas
from trainer_backend.credit.credit import Measured
from trainer_backend.credit.rewards import Rewards
from trainer_backend.errors import AdvantageError, RewardError

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
    return job_parts.credit(tiny_job(**TURN_SCORES, **keys)).credits(rollouts)


def test_a_decision_without_its_reward_is_an_error_of_its_rollout():
    item = played(3, dialogue(0.5, 0.5))
    steps = (item.trajectory.steps[0], item.trajectory.steps[1].model_copy(update={"env_rewards": None}))
    with pytest.raises(RewardError) as caught:
        credits([item.model_copy(update={"trajectory": item.trajectory.model_copy(update={"steps": steps})})])
    assert caught.value.where == "rollout r/3, turn 2"


def test_a_causal_horizon_counts_the_decisions_that_were_done_before():
    # wood at the first decision; the limit is 10: 1 + 0.5 * 10, and 1 + 0.5 * 6 where 4 decisions were done
    keys = {"training__step_rewards_beta": 0.5, "training__step_rewards_horizon": "max_decisions"}
    item = hand_made.rollout(1, [hand_made.WOOD, ()])
    steps = tuple(
        step.model_copy(update={"metadata": StepMetadata(decision_rewards=step_deltas(step))})
        for step in item.trajectory.steps
    )
    item = item.model_copy(update={"trajectory": item.trajectory.model_copy(update={"steps": steps})})
    rewards = Rewards(tiny_job(**keys).training, max_decisions=10)
    assert rewards.earned_by(item, {}).rewards_T == [6.0, 0.0]
    assert rewards.earned_by(item, {}, decisions_done=4).rewards_T == [4.0, 0.0]
    # as a branch from the second of at most 8 decisions, one of which was done: 1 + 0.5 * 7
    job = tiny_job(**keys, algorithm__advantage="branch")
    measured = Measured(branches={item.rollout_id: {2: [item]}})
    (found,) = job_parts.credit(job).credits([item], measured)
    assert found.branch_returns_T == [[], [4.5]]


def test_what_decisions_pay_for_their_kl_is_paid_only_where_the_job_says_so():
    job = tiny_job(**TURN_SCORES, training__kl_reward_coef=0.5)
    item, rewards = two_dialogues()[1], Rewards(job.training, max_decisions=10)
    scored = ScoredTokens([[-1.0], [-1.0]], [[-3.0], [-1.0]])  # 2 nats, then none
    assert rewards.earned_by(item, {"r/1": scored}).rewards_T == [-0.5, 0.5]
    assert rewards.without_kl().earned_by(item, {"r/1": scored}).rewards_T == [0.5, 0.5]
    assert not Rewards(tiny_job().training, max_decisions=10).pays_kl
    with pytest.raises(RewardError) as caught:
        rewards.earned_by(item, {"r/1": ScoredTokens([[-1.0], [-1.0]], [[-3.0], []])})
    assert caught.value.where == "rollout r/1, turn 2"


GIGPO = {"advantage": "gigpo", "fnorm": "one", "gamma": 0.5, "omega": 0.5}


def test_episode_scores_are_outcomes_where_the_job_says_so_and_step_returns_come_from_the_rewards():
    # Outcomes 1 and 1/2: A_E = 1/4, -1/4. Returns 1/2, 1 and 3/4, 1/2 (gamma 1/2), of which the first meet in
    # one state: A_S = -1/8, 1/8, and 0 in states that are met once.
    first, second = credits(two_dialogues(), **GIGPO, episode_score="outcome")
    assert first.parts["episode_advantage"] == [0.25, 0.25]
    assert first.parts["step_advantage"] == [-0.125, 0.0]
    assert second.parts["episode_advantage"] == [-0.25, -0.25]
    assert second.parts["step_advantage"] == [0.125, 0.0]
    assert (first.advantages_T, second.advantages_T) == ([0.0625, 0.125], [-0.0625, -0.125])
    assert (first.rewards_T, second.rewards_T) == ([0.0, 1.0], [0.5, 0.5])
    for summed in (
        credits(two_dialogues(), **GIGPO),
        credits(two_dialogues(), **GIGPO, episode_score="rewards"),
    ):
        assert [item.parts["episode_advantage"] for item in summed] == [[0.0, 0.0]] * 2, "both sum to 1"


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
    first, second = credits(judged, advantage="rloo", episode_score="outcome")
    assert (first.advantages_T, second.advantages_T) == ([-2.0, -2.0], [2.0, 2.0])


def with_tokens(calls, final_view=None):
    """A dialogue whose decisions have these (reused, prompt, answer) ids, cut short by its number of them."""
    told = [
        PolicyLogprobs(
            prompt_ids_reused=reused, prompt_token_ids=prompt, token_ids=answer, finish_reason="stop",
            logprobs=(-1.0,) * len(answer), versions=((0, 0),),
        )
        for reused, prompt, answer in [*calls, *([final_view] if final_view else [])]
    ]  # fmt: skip
    episode = dialogue(*[0.0] * len(calls))
    steps = [
        step.model_copy(update={"policy_logprobs": call, "sampling": Sampling()})
        for step, call in zip(episode.steps, told, strict=False)
    ]
    ending = {"truncated": True, "terminated": False, "stop_reason": StopReason.MAX_DECISIONS}
    view = told[-1] if final_view else None
    return played(0, episode.model_copy(update={"steps": tuple(steps), "final_view": view, **ending}))


def test_the_view_after_the_last_decision_is_read_where_the_next_one_would_have_begun():
    grown = with_tokens([(0, (1, 2), (3,)), (3, (4,), (5, 6))], final_view=(6, (7, 8), (9, 10)))
    view = job_parts.credit(tiny_job()).policies.final_view_by(grown)
    assert view.token_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert view.sampled_positions.tolist() == [8], "the token after the whole prompt"
    fresh = with_tokens([(0, (1, 2), (3,))], final_view=(0, (1, 4), (9,)))
    assert job_parts.credit(tiny_job()).policies.final_view_by(fresh).token_ids.tolist() == [1, 4, 9]
    assert job_parts.credit(tiny_job()).policies.final_view_by(with_tokens([(0, (1, 2), (3,))])) is None
    assert (
        job_parts.credit(tiny_job()).final_views([grown])["r/0"].token_ids.tolist() == view.token_ids.tolist()
    )


def test_a_critic_goes_on_from_where_a_limit_cut_and_refuses_a_missing_value():
    # One decision, no reward, V = 1, V(s_T) = 4, gamma 1/2: A = 0 + 4/2 - 1.
    keys = {"algorithm__advantage": "gae", "algorithm__gamma": 0.5, "algorithm__bootstrap_truncated": True}
    job, cut = tiny_job(**TURN_SCORES, **keys), with_tokens([(0, (1, 2), (3,))])
    values = {"r/0": [1.0]}
    (found,) = job_parts.credit(job).credits([cut], Measured(values, {"r/0": 4.0}))
    assert (found.advantages_T, found.returns_T, found.value_after) == ([1.0], [2.0], 4.0)
    silent = cut.trajectory.model_copy(update={"stop_reason": StopReason.MAX_USER_TURNS})
    for measured, rollout in (
        (Measured(values, {}), cut),  # the prompt did not fit
        (Measured(values, {"r/0": 4.0}), cut.model_copy(update={"trajectory": silent})),
    ):
        assert job_parts.credit(job).credits([rollout], measured)[0].advantages_T == [-1.0]
    with pytest.raises(AdvantageError, match="rollout r/0: no value of the state after its last decision"):
        job_parts.credit(job).credits([cut], Measured(values))


@pytest.mark.parametrize(
    ("advantage", "critic_lambda", "targets_T"),
    [
        ("gae", None, [1.5, 1.0]),  # r_t + 1/2 V(s_{t+1}), which holds the critic's own 3
        ("gae", 1.0, [0.5, 1.0]),  # the returns
        ("gae", 0.5, [1.0, 1.0]),  # half-way
        ("gae_token", 1.0, [0.5, 1.0]),
    ],
)
def test_a_critic_may_learn_with_another_lambda_than_the_policy(advantage, critic_lambda, targets_T):
    # r = 0, 1; V = 1, 3; gamma 1/2 and lambda 0: A = 0 + 3/2 - 1 and 1 - 3
    keys = {"advantage": advantage, "gamma": 0.5, "gae_lambda": 0.0, "critic_lambda": critic_lambda}
    job = tiny_job(**TURN_SCORES, **{f"algorithm__{key}": value for key, value in keys.items()})
    values = [1.0, 3.0] if advantage == "gae" else ByToken([[1.0], [3.0]])
    episode = played(0, dialogue(0.0, 1.0))
    (found,) = job_parts.credit(job).credits([episode], Measured({episode.rollout_id: values}))
    assert (found.advantages_T, found.returns_T) == ([0.5, -2.0], targets_T)


def test_advantages_by_token_are_stored_next_to_those_of_the_decision():
    # no reward, V = 1, 2, lambda 1/2: -2, and 2 - 1 + 1/2 * -2
    keys = {"advantage": "gae_token", "gamma": 1.0, "gae_token_lambda": 0.5}
    job = tiny_job(**TURN_SCORES, **{f"algorithm__{key}": value for key, value in keys.items()})
    values = Measured({"r/0": ByToken([[1.0, 2.0]])})
    (found,) = job_parts.credit(job).credits([with_tokens([(0, (1, 2), (3, 4))])], values)
    assert [*map(list, found.token_advantages.rows_T)] == [[0.0, -2.0]]
    assert [*map(list, found.token_values.rows_T)] == [[1.0, 2.0]]
