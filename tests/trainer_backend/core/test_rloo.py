"""`rloo` by hand and by identity."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.grpo import grpo_no_std
from trainer_backend.core.advantages.rloo import rloo
from trainer_backend.job.training_table import AlgorithmTable

SCORES = st.lists(st.integers(-80, 80).map(lambda tenths: tenths / 10), min_size=2, max_size=8)


def of_scores(scores):
    episodes = [EpisodeRewards(f"r-{i}", "g", [score, 0.0]) for i, score in enumerate(scores)]
    return rloo(episodes, AlgorithmTable(gamma=1.0))


def test_each_score_is_compared_with_the_mean_of_the_others():
    assert of_scores([1.0, 0.0, 1.0]).per_episode == [[0.5, 0.5], [-1.0, -1.0], [0.5, 0.5]]


@given(SCORES)
def test_it_is_the_deviation_from_the_mean_of_all_times_g_over_g_minus_1(scores):
    episodes = [EpisodeRewards(f"r-{i}", "g", [score]) for i, score in enumerate(scores)]
    of_all = grpo_no_std(episodes, AlgorithmTable(gamma=1.0)).per_episode
    factor = len(scores) / (len(scores) - 1)
    for own, (deviation,) in zip(rloo(episodes, AlgorithmTable(gamma=1.0)).per_episode, of_all, strict=True):
        assert own == pytest.approx([factor * deviation], abs=1e-12)
