"""Estimators that compare siblings, the batch or branches, worked by hand; and returns.

What holds of every estimator, and exact arithmetic: test_every_estimator.py.
"""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.branch import branch, branch_turns
from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.core.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from trainer_backend.core.advantages.rloo import rloo
from trainer_backend.core.advantages.spread import flat_groups
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.rewards import discounted_returns
from trainer_backend.errors import AdvantageError
from trainer_backend.job.training_table import AlgorithmTable

ONE, HALF = AlgorithmTable(gamma=1.0), AlgorithmTable(gamma=0.5)
THIRD = math.sqrt(3) / 3


def batch(**groups):
    """Episodes by their rewards."""
    return [
        EpisodeRewards(f"{name}-{i}", name, rewards_T)
        for name, members in groups.items()
        for i, rewards_T in enumerate(members)
    ]


@pytest.mark.parametrize(
    ("estimator", "keys", "groups", "expected"),
    [
        # scores 1, 0, 1: mean 2/3, sample variance (1/9 + 4/9 + 1/9) / 2 = 1/3; verl's, without its epsilon
        (grpo, ONE, {"g": [[1.0], [0.0], [1.0]]}, [[THIRD], [-2 * THIRD], [THIRD]]),
        # squares of tiny rewards would underflow
        (grpo, ONE, {"g": [[0.0], [1e-200]]}, [[-math.sqrt(0.5)], [math.sqrt(0.5)]]),
        # the score is the sum of the rewards, whenever they came
        (grpo_no_std, ONE, {"g": [[1.0, 0.0, 1.0], [0.0]]}, [[1.0, 1.0, 1.0], [-1.0]]),
        (rloo, ONE, {"g": [[1.0, 0.0], [0.0], [1.0]]}, [[0.5, 0.5], [-1.0], [0.5]]),
        # returns-to-go [3, 2], [1, 1], [2, 0]: the others' means are 1.5, 2.5, 2, and then 0.5, 1, 1.5
        (stepwise, ONE, {"g": [[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]]}, [[1.5, 1.5], [-1.5, 0.0], [0.0, -1.5]]),
        # at t = 1 only the first still plays: baseline (0 + 0) / 2
        (stepwise, ONE, {"g": [[0.0, 4.0], [1.0], [3.0]]}, [[2.0, 4.0], [-2.5], [0.5]]),
        (stepwise, HALF, {"g": [[0.0, 0.0, 1.0, 0.0], [0.0]]}, [[0.25, 0.5, 1.0, 0.0], [-0.25]]),
        # returns 2, 2 and 4, 0: mean 2, sample variance 8/3
        (
            reinforce_pp,
            HALF,
            {"g": [[1.0, 2.0]], "h": [[4.0, 0.0]]},
            [[0.0, 0.0], [2 / math.sqrt(8 / 3), -2 / math.sqrt(8 / 3)]],
        ),
        # -1, 1, -1, 1 against their groups; sample variance 4/3
        (
            reinforce_pp_baseline,
            ONE,
            {"g": [[1.0], [3.0]], "h": [[11.0], [13.0]]},
            [[-1.5 * THIRD], [1.5 * THIRD]] * 2,
        ),
    ],
)
def test_advantages_by_hand(estimator, keys, groups, expected):
    found = estimator(batch(**groups), keys).per_episode
    assert found == [pytest.approx(row_T, rel=1e-15) for row_T in expected]


def test_lone_episodes_and_groups_without_spread_have_advantage_0_and_are_counted():
    episodes = batch(lone=[[5.0, 1.0]], flat=[[1.0], [1.0]], live=[[1.0], [1.0, 0.0, 1.0]])
    counts = {
        "advantages/groups": 3.0,
        "advantages/groups_without_spread": 1.0,
        "advantages/lone_episodes": 1.0,
    }
    for estimator, more in ((grpo, {}), (stepwise, {"advantages/lone_decisions": 2.0})):
        found = estimator(episodes, ONE)
        assert found.per_episode[:3] == [[0.0, 0.0], [0.0], [0.0]]
        assert found.diagnostics == counts | more


def test_a_decision_with_branches_is_compared_with_their_mean():
    # G of a: 1 + 2/2 + 4/4 = 3, 2 + 4/2 = 4, 4; of b: 2, 0.
    a = EpisodeRewards("a", "g", [1.0, 2.0, 4.0], branch_returns_T=[[], [1.0, 2.0], []])
    b = EpisodeRewards("b", "g", [2.0, 0.0], branch_returns_T=[[], []])
    found = branch([a, b], HALF)
    assert found.per_episode == [[3.0 - 2.0, 4.0 - 1.5, 4.0 - 0.0], [2.0 - 3.0, 0.0 - 4.0]]
    assert found.parts["branches"] == [[None, 2.0, None], [None, None]]
    assert found.parts["compared"] == [[1.0, None, 1.0], [1.0, 1.0]]
    assert found.diagnostics["advantages/branched"] == 1.0
    assert found.diagnostics["advantages/branched_share"] == 1 / 5
    assert found.diagnostics["advantages/branched_abs"] == 2.5
    assert found.diagnostics["advantages/branched_abs_stepwise"] == 4.0


@given(st.integers(0, 2**31), st.integers(1, 9), st.integers(1, 12), st.integers(1, 2))
def test_branch_turns_are_distinct_sorted_and_reproducible(seed, count, longest, first):
    turns = branch_turns(seed, count=count, max_decisions=longest, first=first)
    assert turns == branch_turns(seed, count=count, max_decisions=longest, first=first)
    assert list(turns) == sorted(set(turns)) and set(turns) <= set(range(first, longest + 1))
    assert len(turns) == min(count, longest - first + 1)


def test_every_turn_is_chosen_equally_often():
    chosen = [turn for seed in range(6000) for turn in branch_turns(seed, count=2, max_decisions=6)]
    shares = [chosen.count(turn) / len(chosen) for turn in range(1, 7)]
    assert shares == pytest.approx([1 / 6] * 6, abs=0.01)


def flat(estimator, **groups):
    episodes = batch(**groups)
    return flat_groups(episodes, estimator(episodes, ONE).per_episode)


def test_groups_are_flat_by_their_advantages_and_not_by_their_totals():
    # both of "a" earn 1, one at its first decision, the other at its second: G is (1, 0) and (1, 1)
    groups = {"a": [[1.0, 0.0], [0.0, 1.0]], "same": [[0.0, 2.0], [0.0, 2.0]], "lone": [[3.0]]}
    assert flat(grpo, **groups) == flat(grpo_no_std, **groups) == ["a", "same", "lone"]
    assert flat(stepwise, **groups) == ["same", "lone"]


def test_rounding_is_no_spread_and_a_small_spread_is_one_in_any_unit():
    # three times 0.1 is 0.30000000000000004 in floats, and half of what is left of it is not 0.1 again
    rounded = [[0.1 - (0.1 + 0.1 + 0.1 - 0.1) / 2]] * 3
    assert flat_groups(batch(a=[[0.1], [0.1], [0.1]]), rounded) == ["a"]
    for unit in (1e-9, 1.0, 1e9):
        assert flat(stepwise, a=[[unit], [unit * (1 + 1e-9)]]) == []
        assert flat(grpo, a=[[unit], [unit * (1 + 1e-9)]]) == []


def test_advantages_in_standard_deviations_are_not_measured_by_the_unit_of_the_rewards():
    episodes = batch(a=[[1e9], [1e9]], b=[[1e9], [0.0]])
    assert flat_groups(episodes, [[1e-4], [-1e-4], [1.0], [-1.0]]) == []
    assert flat_groups(episodes, [[1e-17], [-1e-17], [1.0], [-1.0]]) == ["a"]
    with pytest.raises(AdvantageError, match="the reward is nan"):
        flat_groups(batch(a=[[math.nan]]), [[0.0]])


@given(st.lists(st.integers(-8, 8).map(float), max_size=20), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
def test_each_return_is_its_reward_and_the_discounted_next_return(rewards_T, gamma):
    returns_T = [*discounted_returns(rewards_T, gamma), 0.0]
    assert all(returns_T[t] == r + gamma * returns_T[t + 1] for t, r in enumerate(rewards_T))


@pytest.mark.parametrize("gamma", [-0.1, 1.01, float("nan")])
def test_a_gamma_outside_0_1_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma must lie in \[0, 1\]"):
        discounted_returns([1.0], gamma)
