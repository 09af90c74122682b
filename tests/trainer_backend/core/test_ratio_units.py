"""Which tokens share a ratio, and which segments a step may not part."""

from trainer_backend.core.segments import CONTEXT, Segment
from trainer_backend.core.units import ratio_units
from trainer_backend.learner.steps import Scored, in_steps, together


def segment(name, *decision):
    count = len(decision)
    return Segment(name, tuple(range(count)), decision, (-1.0,) * count, (0,) * count, (1.0,) * count)


# two segments of one episode, the second of which has two decisions; and another episode
PARTS = [segment("a", CONTEXT, 0, 0), segment("a", CONTEXT, 1, 1, CONTEXT, 2), segment("b", CONTEXT, 0)]


def test_a_token_shares_its_ratio_with_nobody_its_decision_or_its_episode():
    assert ratio_units(PARTS, "token") == [[0, 1], [2, 3, 4], [5]]
    assert ratio_units(PARTS, "decision") == [[0, 0], [1, 1, 2], [3]]
    assert ratio_units(PARTS, "episode") == [[0, 0], [0, 0, 0], [1]]


def test_an_episode_that_shares_its_ratio_is_not_parted_by_a_step():
    scored = [Scored(part, [-1.0] * len(part.sampled_positions)) for part in PARTS]
    steps = list(in_steps(together(scored, "episode"), batch_decisions=1))
    assert [[item.segment.rollout_id for item in step] for step in steps] == [["a", "a"], ["b"]]
    assert [len(step) for step in in_steps(together(scored, "decision"), batch_decisions=1)] == [1, 1, 1]
