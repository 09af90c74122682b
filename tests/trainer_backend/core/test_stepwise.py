"""`stepwise` by hand and by identity; that it is unbiased: test_unbiased.py."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.job.training_table import AlgorithmTable

EPISODE = st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=6)
GROUP = st.lists(EPISODE, min_size=1, max_size=5)


def advantages_of(group, gamma=1.0):
    episodes = [EpisodeRewards(f"r-{i}", "g", rewards_T) for i, rewards_T in enumerate(group)]
    return stepwise(episodes, AlgorithmTable(gamma=gamma))


def test_each_decision_is_compared_with_its_siblings_at_the_same_t():
    # returns-to-go [3, 2], [1, 1], [2, 0]: at t = 0 the others' means are 1.5, 2.5, 2; at t = 1 0.5, 1, 1.5
    result = advantages_of([[1.0, 2.0], [0.0, 1.0], [2.0, 0.0]])
    assert result.per_episode == [[1.5, 1.5], [-1.5, 0.0], [0.0, -1.5]]


def test_a_finished_sibling_counts_as_0_and_a_survivor_keeps_its_return():
    # at t = 1 only the first still plays: baseline (0 + 0) / 2
    assert advantages_of([[0.0, 4.0], [1.0], [3.0]]).per_episode == [[2.0, 4.0], [-2.5], [0.5]]


def test_a_later_reward_is_credited_to_every_decision_up_to_it_and_none_after():
    result = advantages_of([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]], gamma=0.5)
    assert result.per_episode == [[0.25, 0.5, 1.0, 0.0], [-0.25, -0.5, -1.0, 0.0]]


def test_one_sibling_left_has_advantage_0_and_its_decisions_are_counted():
    result = stepwise(
        [
            EpisodeRewards("a", "lone", [5.0, 1.0]),
            EpisodeRewards("b", "flat", [1.0]),
            EpisodeRewards("c", "flat", [1.0]),
            EpisodeRewards("d", "live", [1.0]),
            EpisodeRewards("e", "live", [1.0, 0.0, 1.0]),
        ],
        AlgorithmTable(gamma=1.0),
    )
    assert result.per_episode[:3] == [[0.0, 0.0], [0.0], [0.0]]
    assert result.diagnostics == {
        "advantages/groups": 3.0,
        "advantages/groups_without_spread": 1.0,
        "advantages/lone_episodes": 1.0,
        "advantages/lone_decisions": 2.0,
    }


def test_a_gamma_outside_0_1_is_refused():
    with pytest.raises(ValueError, match="gamma"):
        advantages_of([[1.0]], gamma=1.5)


@given(GROUP, st.integers(0, 4), st.integers(-8, 8))
def test_the_baseline_of_an_episode_does_not_depend_on_its_own_rewards(group, index, change):
    index %= len(group)
    if len(group) == 1:
        return
    changed = [list(rewards_T) for rewards_T in group]
    changed[index][-1] += change
    before = advantages_of(group).per_episode[index]
    after = advantages_of(changed).per_episode[index]
    assert after == pytest.approx([advantage + change for advantage in before])


@given(st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=5), min_size=2, max_size=5))
def test_advantages_agree_with_exact_arithmetic_to_1e_12_of_the_largest_score(group):
    exact = [[sum(map(Fraction, row[t:]), Fraction(0)) for t in range(len(row))] for row in group]
    largest = max(abs(value) for row in exact for value in row)
    for i, row in enumerate(advantages_of(group).per_episode):
        for t, advantage in enumerate(row):
            others = sum((row[t] for j, row in enumerate(exact) if j != i and t < len(row)), Fraction(0))
            assert abs(advantage - (exact[i][t] - others / (len(group) - 1))) <= 1e-12 * max(largest, 1.0)
