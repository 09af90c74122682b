"""Which tokens share a ratio, and which segments a step may not part."""

from tests.trainer_backend.segment_columns import lists, make_segment
from trainer_backend.core.aggregation import number_units
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.segments import CONTEXT
from trainer_backend.learner.stepping import Scored, in_steps, together


def segment(name, *decision):
    count = len(decision)
    return make_segment(name, range(count), decision, (-1.0,) * count)


# two segments of one episode, the second of which has two decisions; and another episode
PARTS = [segment("a", CONTEXT, 0, 0), segment("a", CONTEXT, 1, 1, CONTEXT, 2), segment("b", CONTEXT, 0)]


def test_a_token_shares_its_ratio_with_nobody_its_decision_or_its_episode():
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
