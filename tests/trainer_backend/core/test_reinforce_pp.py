"""`reinforce_pp` and its variant with a group baseline, by hand and by identity."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.advantages.episodes import EpisodeRewards
from trainer_backend.core.advantages.reinforce_pp import reinforce_pp, reinforce_pp_baseline
from trainer_backend.job.training_table import AlgorithmTable

EPISODE = st.tuples(
    st.sampled_from(["g", "h"]), st.lists(st.integers(-8, 8).map(float), min_size=1, max_size=4)
)
BATCH = st.lists(EPISODE, min_size=1, max_size=5)


def batch_of(drawn):
    return [EpisodeRewards(f"r-{i}", group, rewards) for i, (group, rewards) in enumerate(drawn)]


def test_returns_are_standardised_over_all_decisions_of_the_batch():
    # returns with gamma 1/2: 2, 2 and 4, 0: mean 2, sample variance (0 + 0 + 4 + 4) / 3
    episodes = batch_of([("g", [1.0, 2.0]), ("h", [4.0, 0.0])])
    result = reinforce_pp(episodes, AlgorithmTable(gamma=0.5))
    std = math.sqrt(8 / 3)
    assert result.per_episode[0] == [0.0, 0.0]
    assert result.per_episode[1] == pytest.approx([2 / std, -2 / std])


def test_with_a_baseline_worlds_of_unlike_difficulty_are_made_alike_first():
    # scores 1, 3 in one world and 11, 13 in the other: -1, 1, -1, 1 against their groups; std sqrt(4/3)
    episodes = batch_of([("g", [1.0]), ("g", [3.0]), ("h", [11.0]), ("h", [13.0])])
    result = reinforce_pp_baseline(episodes, AlgorithmTable(gamma=1.0))
    one = math.sqrt(3 / 4)
    assert [value for (value,) in result.per_episode] == pytest.approx([-one, one, -one, one])


def test_the_parts_of_a_baseline_by_hand():
    # scores 1 and 3 against a mean of 2; the one of 3 has two decisions, so the batch has a mean of 1/4:
    # B = -1, 1, 1 and 0 of a lone episode, deviations -5/4, 3/4, 3/4, -1/4, sample variance (44/16) / 3
    parts = reinforce_pp_baseline(
        batch_of([("g", [1.0]), ("g", [3.0, 0.0]), ("h", [9.0])]), AlgorithmTable(gamma=1.0)
    ).parts
    assert parts["score"] == [[1.0], [3.0, 3.0], [9.0]]
    assert parts["baseline"] == [[2.0], [2.0, 2.0], [9.0]]
    assert parts["batch_baseline"] == [[0.25], [0.25, 0.25], [0.25]]
    assert parts["scale"] == [[pytest.approx(math.sqrt(44 / 48))] * length for length in (1, 2, 1)]


@given(BATCH, st.sampled_from([reinforce_pp, reinforce_pp_baseline]))
def test_over_the_batch_the_mean_is_0_and_the_sample_std_1_unless_all_are_equal(drawn, estimator):
    values = [v for row in estimator(batch_of(drawn), AlgorithmTable(gamma=0.5)).per_episode for v in row]
    assert math.fsum(values) == pytest.approx(0.0, abs=1e-9)
    if any(values):
        assert math.fsum(v * v for v in values) / (len(values) - 1) == pytest.approx(1.0)
