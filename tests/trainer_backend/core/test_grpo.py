import math
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.grpo import grpo, grpo_no_std
from trainer_backend.job.training_table import AlgorithmTable

CONFIG = AlgorithmTable(gamma=1.0)


def group(scores, name="g"):
    return [EpisodeRewards(f"{name}-{i}", name, [score]) for i, score in enumerate(scores)]


def firsts(advantages):
    return [row_T[0] for row_T in advantages.per_episode]


def test_scores_are_measured_in_sample_standard_deviations_from_the_group_mean():
    # scores 1, 0, 1: mean 2/3, sample variance (1/9 + 4/9 + 1/9) / 2 = 1/3
    result = firsts(grpo(group([1.0, 0.0, 1.0]), CONFIG))
    assert result == pytest.approx([math.sqrt(3) / 3, -2 * math.sqrt(3) / 3, math.sqrt(3) / 3], rel=1e-15)


def test_without_std_the_deviation_itself_is_the_advantage():
    assert firsts(grpo_no_std(group([1.0, 0.0, 2.0]), CONFIG)) == [0.0, -1.0, 1.0]


def test_the_score_is_the_sum_of_the_rewards_and_every_decision_gets_the_same_advantage():
    episodes = [EpisodeRewards("a", "g", [1.0, 0.0, 1.0]), EpisodeRewards("b", "g", [0.0])]
    assert grpo_no_std(episodes, CONFIG).per_episode == [[1.0, 1.0, 1.0], [-1.0]]


def test_when_inside_the_episode_a_reward_came_changes_nothing():
    early = [EpisodeRewards("a", "g", [3.0, 0.0]), EpisodeRewards("b", "g", [0.0])]
    late = [EpisodeRewards("a", "g", [0.0, 3.0]), EpisodeRewards("b", "g", [0.0])]
    assert grpo(early, CONFIG) == grpo(late, CONFIG)


def test_groups_do_not_mix_and_may_come_in_any_order():
    episodes = group([1.0, 3.0], "x") + group([10.0, 30.0], "y")
    interleaved = [episodes[i] for i in (2, 0, 3, 1)]
    assert firsts(grpo_no_std(interleaved, CONFIG)) == [-10.0, -1.0, 10.0, 1.0]


def test_a_lone_score_and_a_group_without_spread_have_advantage_0_and_are_counted():
    episodes = group([7.0], "lone") + group([2.0, 2.0], "flat")
    episodes += group([0.0, 1.0], "live") + group([5.0, 3.0], "alive")
    result = grpo(episodes, CONFIG)
    assert firsts(result)[:3] == [0.0, 0.0, 0.0]
    assert result.diagnostics == {
        "advantages/groups": 4.0,
        "advantages/groups_without_spread": 1.0,
        "advantages/lone_episodes": 1.0,
    }


def test_tiny_rewards_do_not_underflow_in_the_std():
    assert firsts(grpo(group([0.0, 1e-200]), CONFIG)) == pytest.approx([-math.sqrt(0.5), math.sqrt(0.5)])


@given(st.lists(st.floats(-1e6, 1e6, allow_subnormal=False), min_size=2, max_size=8))
def test_deviations_agree_with_exact_arithmetic_to_1e_12_of_the_largest_score(scores):
    exact = [Fraction(score) - sum(map(Fraction, scores)) / len(scores) for score in scores]
    largest = max(map(abs, scores))
    found = firsts(grpo_no_std(group(scores), CONFIG))
    assert all(abs(a - b) <= 1e-12 * largest for a, b in zip(found, exact, strict=True))
