"""A run that cannot learn says so, after two iterations without a signal."""

import pytest

from trainer_backend.run.iteration_metrics import nothing_to_learn

GOOD = {"reward/batch_nonzero": 1.0, "group/flat": 1.0, "advantages/groups": 4.0}
FLAT = {**GOOD, "group/flat": 4.0}
UNPAID = {**FLAT, "reward/batch_nonzero": 0.0}


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        ([UNPAID], None),
        ([UNPAID, UNPAID], "no decision has earned anything since iteration 1"),
        ([UNPAID, UNPAID, UNPAID], None),  # said once
        ([UNPAID] * 25, "since iteration 1"),
        ([GOOD, FLAT, FLAT], "no group has any spread since iteration 2"),
        ([GOOD, FLAT, UNPAID], "no group has any spread since iteration 2"),
        ([FLAT, GOOD, FLAT], None),
        ([{}, {}], None),  # rows of an earlier version
    ],
)
def test_a_warning_names_the_iteration_since_which_nothing_is_learned(kinds, words):
    told = nothing_to_learn([{"iteration": number, **kind} for number, kind in enumerate(kinds, start=1)])
    assert (words is None) == (told is None)
    assert words is None or words in told
