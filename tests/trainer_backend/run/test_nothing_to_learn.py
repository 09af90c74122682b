"""A run that cannot learn says so: no signal, calls that are forgotten, or steps that are too large."""

import pytest

from trainer_backend.run.warnings import (
    find_warnings,
    nothing_to_learn,
    warn_of_far_steps,
    warn_of_lost_calls,
)

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
    def reads(row, *, compares_siblings=True):
        read = []
        rows = [{"kind": "iteration", "iteration": 1, **row}]
        list(find_warnings(row, lambda: read.append(1) or rows, compares_siblings=compares_siblings))
        return bool(read)

    assert not reads(GOOD) and not reads(BY_OUTCOME)
    assert reads(FLAT) and reads(BY_OUTCOME, compares_siblings=False)


@pytest.mark.parametrize(
    ("refused", "told"),
    [
        ([0.01, 0.02, 0.5], True),
        ([0.01, 0.5, 0.9], False),  # said once
        ([0.01, *[0.6] * 26], True),  # and again
        ([0.01, 0.6, 0.3, 0.7], True),
        ([0.01, 0.49], False),
        ([0.6, 0.7], False),  # a policy that never wrote calls
        ([0.2, 0.7], False),
        ([None, 0.01, None, 0.7], True),  # iterations that the actor did not play
    ],
)
def test_a_policy_that_forgets_how_a_call_is_written_is_told(refused, told):
    rows = [
        {"iteration": number} if share is None else {"iteration": number, "episode/invalid_frac": share}
        for number, share in enumerate(refused, start=1)
    ]
    assert (warn_of_lost_calls(rows) is not None) == told


def test_the_warning_compares_the_iterations_and_names_a_critic_that_expects_too_much():
    before, after = ({"iteration": i, "episode/invalid_frac": share} for i, share in ((4, 0.002), (9, 0.52)))
    too_high = {**after, "value/mean": 0.64, "value/return_mean": -0.6}
    assert "52% of the decisions of iteration 9 were refused, and 0.2% of iteration 4" in warn_of_lost_calls(
        [before, after]
    )
    assert "expects 0.64 where decisions return -0.6" in warn_of_lost_calls([before, too_high])
    assert "critic" not in warn_of_lost_calls([before, {**too_high, "value/mean": -0.7}])


@pytest.mark.parametrize(
    ("steps", "told"),
    [
        ([(1, 9)] * 3, True),
        ([(1, 9)] * 2, False),
        ([(1, 9)] * 4, False),  # said once
        ([(1, 9)] * 28, True),  # and again
        ([(1, 0)] * 3, False),  # iterations of one step
        ([(2, 9)] * 3, False),
        ([(1, 9), (8, 0), (1, 9), (1, 9)], False),
        ([(None, None)] * 3, False),  # no update
    ],
)
def test_iterations_whose_first_step_is_too_large_are_told(steps, told):
    rows = [
        {"iteration": number, **({"optim/steps": taken, "optim/steps_skipped": left} if taken else {})}
        for number, (taken, left) in enumerate(steps, start=1)
    ]
    assert (warn_of_far_steps(rows) is not None) == told


@pytest.mark.parametrize(
    ("moved", "told"),
    [
        ([0.05, 0.49], None),
        ([0.05, 2.46], "iteration 2 moved the policy by 2.5 nats a token"),
        ([2.0, 0.05, 0.6], "iteration 3 moved"),
        ([2.0, 2.0], None),  # said once
        ([2.0] * 26, "iteration 26 moved"),  # and again
    ],
)
def test_an_iteration_that_makes_another_policy_is_told(moved, told):
    rows = [
        {"kind": "iteration", "iteration": number, "loss/kl_to_proximal": nats, **GOOD}
        for number, nats in enumerate(moved, start=1)
    ]
    found = list(find_warnings(rows[-1], lambda: [{"kind": "evaluation"}, *rows], compares_siblings=False))
    assert [told in line for line in found] == [True] if told else found == []
