"""Weights of sampled tokens, and the units that share a ratio."""

from collections import defaultdict

import pytest

from tests.trainer_backend.segment_columns import lists, segment
from trainer_backend.core.aggregation import constant, decision_mean, episode_equal, number_units, token_mean
from trainer_backend.core.policies import ACTOR
from trainer_backend.errors import BatchError
from trainer_backend.learner.stepping import Scored, in_steps, together

MEANS = [token_mean, decision_mean, episode_equal]
ALL = pytest.mark.parametrize("aggregation", [*MEANS, constant])


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


# two segments of one episode, the second of which has two decisions; and another episode
PARTS = [segment("a", [-1, 0, 0]), segment("a", [-1, 1, 1, -1, 2]), segment("b", [-1, 0])]


def test_a_token_shares_its_ratio_with_no_other_or_with_its_decision_or_episode():
    assert lists(number_units(PARTS, ["token"] * 3)) == [[0, 1], [2, 3, 4], [5]]
    assert lists(number_units(PARTS, ["decision"] * 3)) == [[0, 0], [1, 1, 2], [3]]
    assert lists(number_units(PARTS, ["episode"] * 3)) == [[0, 0], [0, 0, 0], [1]]


def test_samples_of_another_policy_may_share_at_another_level():
    assert lists(number_units(PARTS, ["episode", "episode", "token"])) == [[0, 0], [0, 0, 0], [1]]
    assert lists(number_units(PARTS, ["token", "decision", "episode"])) == [[0, 1], [2, 2, 3], [4]]


def scored(policies):
    counts = [len(part.logprobs) for part in PARTS]
    return [
        Scored(part, [-1.0] * n, [1.0] * n, policy)
        for part, n, policy in zip(PARTS, counts, policies, strict=True)
    ]


def test_an_episode_that_shares_its_ratio_is_not_parted_by_a_step():
    own = scored([ACTOR] * 3)
    steps = list(in_steps(together(own, {ACTOR: "episode"}), batch_decisions=1))
    assert [[item.segment.rollout_id for item in step] for step in steps] == [["a", "a"], ["b"]]
    assert [len(step) for step in in_steps(together(own, {ACTOR: "decision"}), 1)] == [1, 1, 1]


def test_only_the_policy_whose_episodes_share_something_keeps_them_together():
    both = scored(["fixed", "fixed", ACTOR])
    assert list(map(len, together(both, {ACTOR: "token", "fixed": "episode"}))) == [2, 1]
    assert list(map(len, together(both, {ACTOR: "episode", "fixed": "token"}))) == [1, 1, 1]
