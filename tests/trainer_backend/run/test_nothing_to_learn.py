"""A run that cannot learn says so, after two iterations without a signal."""

import pytest

from trainer_backend.run.iteration_metrics import has_signal, nothing_to_learn

GOOD = {"reward/batch_nonzero": 1.0, "group/flat": 1.0, "group/count": 4.0}
FLAT = {**GOOD, "group/flat": 4.0}
UNPAID = {**FLAT, "reward/batch_nonzero": 0.0}
# algorithm.episode_score = "outcome": no decision is paid, and episodes differ.
BY_OUTCOME = {**GOOD, "reward/batch_nonzero": 0.0}


def told_after(kinds, *, compares_siblings=True):
    rows = [{"iteration": number, **kind} for number, kind in enumerate(kinds, start=1)]
    return nothing_to_learn(rows, compares_siblings=compares_siblings)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([UNPAID], None),
        ([UNPAID, UNPAID], "no decision has earned anything since iteration 1"),
        ([UNPAID, UNPAID, UNPAID], None),  # said once
        ([UNPAID] * 25, "since iteration 1"),
        ([UNPAID] * 27, None),
        ([GOOD, FLAT, FLAT], "no group has any spread since iteration 2"),
        ([GOOD, FLAT, UNPAID], "no group has any spread since iteration 2"),
        ([FLAT, GOOD, FLAT], None),
        ([BY_OUTCOME, BY_OUTCOME], None),
        ([{}, {}], None),  # rows of an earlier version
    ],
)
def test_a_warning_names_the_iteration_since_which_nothing_is_learned(kinds, words):
    told = told_after(kinds)
    assert (words is None) == (told is None)
    assert words is None or words in told


def test_a_critics_advantages_are_never_flat_so_there_rewards_decide():
    told = told_after([BY_OUTCOME, BY_OUTCOME], compares_siblings=False)
    assert told and "no decision has earned anything since iteration 1" in told


def test_one_row_says_whether_the_earlier_ones_need_be_read():
    assert has_signal(GOOD, compares_siblings=True) and has_signal(BY_OUTCOME, compares_siblings=True)
    assert not has_signal(FLAT, compares_siblings=True)
    assert not has_signal(BY_OUTCOME, compares_siblings=False)
