import math
from collections import defaultdict

import pytest

from tests.trainer_backend.segment_columns import lists, make_segment
from trainer_backend.core.aggregation import constant, decision_mean, episode_equal, token_mean
from trainer_backend.errors import BatchError

MEANS = [token_mean, decision_mean, episode_equal]
ALL = pytest.mark.parametrize("aggregation", [*MEANS, constant])


def segment(rollout_id, decision):
    n = len(decision)
    return make_segment(rollout_id, (1,) * n, decision, (0.0,) * n)


# episode a: decisions of 1 and 3 tokens, in one segment; episode b: 2, 1 and 1, in two segments
SEGMENTS = [segment("a", [-1, 0, -1, 1, 1, 1]), segment("b", [-1, 0, 0]), segment("b", [-1, 1, -1, 2])]


def test_token_mean_weighs_every_token_the_same():
    assert lists(token_mean(SEGMENTS)) == [[1 / 8] * 4, [1 / 8] * 2, [1 / 8] * 2]


def test_decision_mean_weighs_every_decision_the_same():
    # five decisions
    assert lists(decision_mean(SEGMENTS)) == [
        [1 / 5, 1 / 15, 1 / 15, 1 / 15],
        [1 / 10, 1 / 10],
        [1 / 5, 1 / 5],
    ]


def test_episode_equal_weighs_every_episode_the_same_however_many_segments_it_lies_in():
    assert lists(episode_equal(SEGMENTS)) == [[1 / 8] * 4, [1 / 8] * 2, [1 / 8] * 2]
    alone = [segment("a", [-1, 0]), segment("b", [-1, 0, 0]), segment("b", [-1, 1])]
    assert lists(episode_equal(alone)) == [[1 / 2], [1 / 6, 1 / 6], [1 / 6]]


@pytest.mark.parametrize("aggregation", MEANS)
def test_weights_of_means_sum_to_1(aggregation):
    assert math.fsum(w for row in aggregation(SEGMENTS) for w in row) == pytest.approx(1.0, abs=1e-15)


@ALL
def test_cutting_an_episode_into_more_segments_changes_no_weight(aggregation):
    whole = [segment("a", [-1, 0, 0, -1, 1]), segment("b", [-1, 0])]
    broken = [segment("a", [-1, 0, 0]), segment("a", [-1, -1, -1, -1, 1]), segment("b", [-1, 0])]

    def by_decision(segments):
        found = defaultdict(list)
        for part, row in zip(segments, aggregation(segments), strict=True):
            for t, weight in zip(part.decision, row, strict=True):
                found[part.rollout_id, t].append(weight)
        return found

    assert by_decision(whole) == by_decision(broken)


@ALL
def test_a_step_without_a_sampled_token_is_refused(aggregation):
    with pytest.raises(BatchError, match="no sampled token"):
        aggregation([segment("a", [-1, -1])])
