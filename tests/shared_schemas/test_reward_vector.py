import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared_schemas.rewards import StepRewardKeys, StepRewards, UndefinedReward, reward_vector
from shared_schemas.trajectory import DecisionRewards, ObservationData, RewardPart, StepData, StepMetadata

NAMES = tuple("abcdefgh")
STEPWISE = StepRewards(enabled=True, mode="decision_stepwise")
SPARSE = StepRewards(enabled=True, mode="env_sparse")


def record(turn, unique=0, ach=None):
    ach = unique if ach is None else ach
    return DecisionRewards(
        turn=turn, ach_delta=ach, unique_delta=unique, all=NAMES[:ach], unique=NAMES[:unique]
    )


def step(turn, rewards=None, env_rewards=None, parts=(), metadata=None):
    return StepData(
        turn=turn,
        observation_data=ObservationData(),
        action_taken={"type": "tool_call"},
        env_rewards=env_rewards,
        reward_parts=tuple(RewardPart(source=source, value=value) for source, value in parts),
        metadata=metadata or StepMetadata(decision_rewards=rewards),
    )


def episode(*deltas):
    """Steps with (unique, ach) deltas."""
    return [step(t + 1, record(t + 1, unique, ach)) for t, (unique, ach) in enumerate(deltas)]


class Untouchable(StepMetadata):
    """Metadata that must not be looked at."""

    def __getattribute__(self, name):
        if name == "decision_rewards":
            raise AssertionError("decision metadata was read")
        return super().__getattribute__(name)


@pytest.mark.parametrize(
    ("enabled", "mode", "expected"),
    [
        (False, "off", [0.0, 7.0]),
        (False, "decision_stepwise", [0.0, 7.0]),
        (True, "off", [0.0, 7.0]),
        (True, "decision_stepwise", [1.0, 0.0]),
    ],
)
def test_only_enabled_and_a_mode_other_than_off_leave_the_outcome_path(enabled, mode, expected):
    config = StepRewards(enabled=enabled, mode=mode)
    assert reward_vector(episode((1, 1), (0, 0)), 7.0, config) == expected


@pytest.mark.parametrize(
    "config", [StepRewards(), StepRewards(enabled=True), StepRewards(mode="decision_stepwise"), SPARSE]
)
def test_modes_without_decision_rewards_never_read_decision_metadata(config):
    steps = [step(t, env_rewards=(1.0,), metadata=Untouchable()) for t in (1, 2)]
    assert math.fsum(reward_vector(steps, 2.0, config)) == 2.0


def test_off_adds_the_penalties_of_all_decisions_to_the_outcome_and_no_other_part():
    steps = [step(1, parts=[("penalty", -0.5), ("tool", 9.0)]), step(2, parts=[("penalty", -1.0)])]
    assert reward_vector(steps, 3.0, StepRewards()) == [0.0, 1.5]


def test_parts_of_every_source_are_added_to_their_own_decision_in_both_stepwise_modes():
    parts = [("penalty", -1.0), ("interaction", 0.5), ("tool", 0.25), ("user", 2.0)]
    steps = [step(1, record(1, 1), (1.0, 0.0), parts), step(2, record(2), ())]
    assert reward_vector(steps, 9.0, STEPWISE) == [1.0 + 1.75, 0.0]
    assert reward_vector(steps, 9.0, SPARSE) == [1.0 + 1.75, 0.0]


def test_without_achievements_a_decision_earns_its_parts_alone():
    parts = [("interaction", 0.5), ("penalty", -1.0)]
    steps = [step(1, env_rewards=(9.0,), parts=parts), step(2, parts=[("user", 2.0)]), step(3)]
    everything = StepRewards(
        enabled=True, mode="decision_stepwise", kind="absolute", step_beta=1.0, indicator_lambda=1.0
    )
    for config in (STEPWISE, everything):
        assert reward_vector(steps, 99.0, config) == [-0.5, 2.0, 0.0]


@pytest.mark.parametrize("where", ["observation_data", "next_observation"])
@pytest.mark.parametrize("turn", [1, 2])
def test_a_counter_anywhere_makes_each_missing_record_an_error(where, turn):
    counted = {where: ObservationData(achievements_counts={"wood": 0})}
    steps = [step(t).model_copy(update=counted if t == turn else {}) for t in (1, 2)]
    with pytest.raises(UndefinedReward, match="no decision_rewards") as caught:
        reward_vector(steps, 0.0, STEPWISE)
    assert caught.value.turn == 1


def test_env_sparse_sums_the_env_steps_inside_each_decision():
    steps = [step(1, env_rewards=(1.0, -0.5, 0.25)), step(2, env_rewards=()), step(3, env_rewards=(1.0,))]
    assert reward_vector(steps, 99.0, SPARSE) == [0.75, 0.0, 1.0]


def test_a_causal_horizon_pays_the_same_whatever_follows():
    keys = StepRewards(enabled=True, mode="decision_stepwise", step_beta=0.25)

    def first_reward(length, horizon=None):
        return reward_vector(episode((1, 1), *[(0, 0)] * (length - 1)), 0.0, keys, horizon=horizon)[0]

    assert first_reward(2, 10) == first_reward(10, 10) == 1 + 0.25 * 10
    assert first_reward(2) == 1.5  # the realised length looks into the future
    assert first_reward(10) == 3.5


@given(
    deltas=st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=12),
    lambda_=st.sampled_from([0.0, 0.5]),
    beta=st.sampled_from([0.0, 0.125]),
)
def test_the_vector_equals_the_published_pseudo_code(deltas, lambda_, beta):
    steps = episode(*((min(pair), max(pair)) for pair in deltas))
    for kind in ("unique", "absolute"):
        config = StepRewards(
            enabled=True, mode="decision_stepwise", kind=kind, step_beta=beta, indicator_lambda=lambda_
        )
        expected = [0.0] * len(steps)
        for event in (item.metadata.decision_rewards for item in steps):
            index = event.turn - 1
            expected[index] += float(event.unique_delta if kind == "unique" else event.ach_delta)
            if event.unique_delta > 0:
                expected[index] += lambda_ + beta * (len(steps) - index)
        assert reward_vector(steps, 5.0, config) == expected


@pytest.mark.parametrize(
    ("steps", "turn", "message"),
    [
        ([], None, "an episode without a decision"),
        ([step(1, record(1)), step(3, record(3))], 3, r"turns of this episode are 1\.\.2"),
        ([step(1, record(1)), step(1, record(1))], 1, "found where turn 2 belongs"),
        ([step(1, record(1)), step(2)], 2, "no decision_rewards"),
        ([step(1, record(5))], 1, r"its record names turn 5, outside 1\.\.1"),
        ([step(1, record(1)), step(2, record(1))], 2, "holds a second record for turn 1"),
        ([step(1, record(2)), step(2, record(1))], 1, "holds the record of turn 2"),
        ([step(1, record(1), parts=[("tool", math.nan)])], 1, "the reward is nan"),
    ],
)
def test_a_bad_record_is_refused_with_its_turn(steps, turn, message):
    with pytest.raises(UndefinedReward, match=f"^{message}") as caught:
        reward_vector(steps, 0.0, STEPWISE)
    assert caught.value.turn == turn


def test_what_a_mode_lacks_and_an_episode_beyond_the_horizon_are_refused():
    with pytest.raises(UndefinedReward, match="no env_rewards, which mode 'env_sparse' needs"):
        reward_vector([step(1, env_rewards=(0.0,)), step(2)], 0.0, SPARSE)
    for outcome in (math.nan, math.inf):
        with pytest.raises(UndefinedReward, match=f"the reward is {outcome}"):
            reward_vector([step(1), step(2)], outcome, StepRewards())
    with pytest.raises(UndefinedReward, match="2 decisions, but the horizon is max_decisions = 1"):
        reward_vector(episode((1, 1), (0, 0)), 0.0, STEPWISE, horizon=1)


@pytest.mark.parametrize("key", ["step_beta", "indicator_lambda"])
@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_switches_without_a_meaning_are_refused(key, value):
    with pytest.raises(ValueError, match=key):
        StepRewards(**{key: value})


def test_both_published_forms_hold_the_same_switches():
    keys = StepRewardKeys(
        step_rewards_enabled=True, step_rewards_mode="decision_stepwise", event_rewards_kind="absolute",
        step_rewards_beta=0.25, step_rewards_indicator_lambda=0.5,
    )  # fmt: skip
    wire = {
        "enabled": True, "mode": "decision_stepwise", "kind": "absolute", "step_beta": 0.25,
        "indicator_lambda": 0.5,
    }  # fmt: skip
    assert keys.step_rewards.model_dump() == wire
    assert StepRewards.model_validate(wire) == keys.step_rewards
    assert StepRewards.model_validate_json(keys.step_rewards.model_dump_json()) == keys.step_rewards
    with pytest.raises(ValueError, match="step_rewards_enabled"):
        StepRewards.model_validate({"step_rewards_enabled": True})


def test_parts_that_cancel_but_for_their_rounding_earn_nothing():
    # 0.1 + 0.2 - 0.3 is 5.6e-17 in floats: an episode with a reward, and a spread for its group
    parts = [("interaction", 0.1), ("tool", 0.2), ("penalty", -0.3)]
    assert reward_vector([step(1, env_rewards=(0.0,), parts=parts)], 0.0, SPARSE) == [0.0]
    assert reward_vector([step(1, env_rewards=(0.1, 0.2, -0.3))], 0.0, SPARSE) == [0.0]
    assert reward_vector([step(1, record(1), parts=parts)], 0.0, STEPWISE) == [0.0]
    penalties = [("penalty", -0.1), ("penalty", -0.2)]
    assert reward_vector([step(1, parts=penalties)], 0.3, StepRewards()) == [0.0]
    assert reward_vector([step(1, env_rewards=(1.0, -1.0, 1e-6))], 0.0, SPARSE) == [1e-6]
