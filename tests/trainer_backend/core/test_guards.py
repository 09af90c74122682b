"""An episode whose records do not add up stops the update by its name."""

import itertools

import pytest

from shared_schemas.rewards import StepRewards, decision_rewards, reward_vector
from shared_schemas.trajectory import ObservationData, RewardPart, StepData, StepMetadata
from tests.trainer_backend.dialogues import trajectory
from trainer_backend.core.guards import refuse_lost_reward
from trainer_backend.errors import RewardError

STEPWISE = StepRewards(enabled=True, mode="decision_stepwise")
SPARSE = StepRewards(enabled=True, mode="env_sparse")
OFF = StepRewards()
COUNTS = [{"wood": 0, "drink": 1}, {"wood": 1, "drink": 1}, {"wood": 2, "drink": 1}]


def episode(counts=COUNTS, *, records=None, parts=()):
    """A start with a drink before it; decisions that collect wood."""
    steps = []
    for t, (before, after) in enumerate(itertools.pairwise(counts)):
        record = decision_rewards(before, after, turn=t + 1) if records is None else records[t]
        steps.append(
            StepData(
                turn=t + 1,
                observation_data=ObservationData(achievements_counts=before),
                action_taken={"type": "text", "content": ""},
                env_rewards=(0.1, 0.2),
                reward_parts=tuple(RewardPart(source=source, value=value) for source, value in parts),
                metadata=StepMetadata(decision_rewards=record),
            )
        )
    return trajectory(steps, (), outcome_reward=2.0, achievements_counts=counts[-1])


def checked(item, keys, rewards=None, horizon=None):
    rewards = rewards or reward_vector(item.steps, item.outcome_reward, keys, horizon=horizon)
    refuse_lost_reward(item, rewards, keys, horizon=horizon, rollout_id="r")


@pytest.mark.parametrize("keys", [STEPWISE, SPARSE, OFF])
@pytest.mark.parametrize("parts", [[], [("penalty", -1.0), ("tool", 0.5)]])
def test_what_the_collector_and_the_rewards_make_adds_up_in_every_mode(keys, parts):
    checked(episode(parts=parts), keys)


@pytest.mark.parametrize("keys", [STEPWISE, SPARSE, OFF])
def test_what_decisions_pay_for_their_kl_is_part_of_the_sum(keys):
    item, kl_T = episode(), [-0.5, 0.25]
    paid_T = reward_vector(item.steps, 2.0, keys)
    rewards_T = [paid + kl for paid, kl in zip(paid_T, kl_T, strict=True)]
    refuse_lost_reward(item, rewards_T, keys, rollout_id="r", kl_T=kl_T)
    with pytest.raises(RewardError, match=r"r_t sums to .*, but .*, with the KL, to"):
        refuse_lost_reward(item, paid_T, keys, rollout_id="r", kl_T=kl_T)


def test_what_was_unlocked_before_the_start_is_not_the_episodes():
    checked(episode([{"drink": 3}, {"drink": 4}]), STEPWISE)


@pytest.mark.parametrize(
    ("unlocked", "told"),
    [
        (({}, {}), "rollout r: .* unlocked 0 .*, the episode 1: never credited: wood"),
        (({"wood": 1}, {"wood": 1}), "credited twice: wood"),
        (({"wood": 1}, {"coal": 1}), "credited but not unlocked: coal"),
    ],
)
def test_unlocks_that_the_records_do_not_add_up_to_are_named(unlocked, told):
    records = [decision_rewards({}, names, turn=turn) for turn, names in enumerate(unlocked, 1)]
    with pytest.raises(RewardError, match=told):
        checked(episode(records=records), STEPWISE)


@pytest.mark.parametrize(
    ("keys", "told"),
    [
        (OFF, "r_t sums to 7.0, but outcome_reward and penalties to 2.0"),
        (SPARSE, "r_t sums to 7.0, but env_re"),
        (STEPWISE, "r_t sums to 7.0, but deltas, bonuses and reward_parts to 1.0"),
    ],
)
def test_rewards_that_do_not_sum_to_the_score_are_refused_with_both(keys, told):
    with pytest.raises(RewardError, match=told):
        checked(episode(), keys, rewards=[3.0, 4.0])


def test_the_sum_of_rewards_may_differ_by_rounding_alone():
    checked(episode(), OFF, rewards=[1.0, 1.0 + 1.9e-9])  # of 2: 1e-9 of what was paid
    with pytest.raises(RewardError):
        checked(episode(), OFF, rewards=[1.0, 1.0 + 2.1e-9])
    none = episode([{}, {}]).model_copy(update={"outcome_reward": 0.0})
    with pytest.raises(RewardError):
        checked(none, OFF, rewards=[0.0, 1.1e-9])


@pytest.mark.parametrize("kind", ["unique", "absolute"])
@pytest.mark.parametrize(("horizon", "end"), [(None, 3), (10, 10)])
def test_the_bonuses_of_unlocking_are_part_of_the_sum(kind, horizon, end):
    keys = StepRewards(
        enabled=True, mode="decision_stepwise", kind=kind, step_beta=0.25, indicator_lambda=0.5
    )
    item = episode([{"wood": 0}, {"wood": 0}, {"wood": 1}, {"wood": 2}], parts=[("penalty", -1.0)])
    checked(item, keys, horizon=horizon)
    # wood at t = 1, again at t = 2 ("absolute" counts both); three penalties
    total = (2 if kind == "absolute" else 1) + 0.5 + 0.25 * (end - 1) - 3.0
    checked(item, keys, [total, 0.0, 0.0], horizon)
    with pytest.raises(RewardError, match=f"deltas, bonuses and reward_parts to {total}"):
        checked(item, keys, [total, 0.0, 0.125], horizon)
