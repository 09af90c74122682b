import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.intervals import nested_rate_interval, paired_success_interval, wilson_interval
from trainer_backend.core.statistics import Interval, bounded


def test_half_of_ten_by_hand():
    # z = 1.96: centre (0.5 + 0.19207) / 1.38415 = 0.5; half = 1.96 / 1.38415 * sqrt(0.025 + 0.0096) = 0.2634
    interval = wilson_interval(5, 10)
    assert (interval.mean, interval.count) == (0.5, 10)
    assert (interval.low, interval.high) == (pytest.approx(0.2366, abs=1e-4), pytest.approx(0.7634, abs=1e-4))


def test_none_of_ten_still_has_a_width():
    # z^2 / (n + z^2) = 3.8415 / 13.8415
    interval = wilson_interval(0, 10)
    assert (interval.mean, interval.low) == (0.0, 0.0)
    assert interval.high == pytest.approx(0.27753, abs=1e-5)


@given(st.integers(1, 500).flatmap(lambda count: st.tuples(st.integers(0, count), st.just(count))))
def test_the_interval_holds_the_rate_and_mirrors_that_of_the_failures(trials):
    successes, count = trials
    interval, mirrored = wilson_interval(successes, count), wilson_interval(count - successes, count)
    assert 0.0 <= interval.low <= interval.mean + 1e-12
    assert interval.mean - 1e-12 <= interval.high <= 1.0
    assert interval.low == pytest.approx(1.0 - mirrored.high, abs=1e-12)


@pytest.mark.parametrize(("successes", "count"), [(0, 0), (-1, 3), (4, 3)])
def test_what_is_no_rate_is_refused(successes, count):
    with pytest.raises(ValueError, match=r"trial|0 \.\. 3"):
        wilson_interval(successes, count)


def test_one_episode_a_world_is_a_plain_rate():
    assert nested_rate_interval([1.0, 0.0, 1.0, 0.0], 4) == wilson_interval(2, 4)


def test_repeats_count_as_far_as_worlds_differ_within_themselves():
    # t of 11, 7, 3 and 1 degrees of freedom: 2.201, 2.365, 3.182, 12.706
    # Worlds that are always or never solved: v = (1/4 * 4) / 12 = 1/12, so 3 plays times (2.201 / 3.182)^2
    assert_bounds(nested_rate_interval([1.0, 0.0, 1.0, 0.0], 12), centre=0.5, count=3 * 0.478449)
    # Every world is solved once of two: v = 0, so all 8 plays times (2.365 / 3.182)^2
    assert_bounds(nested_rate_interval([0.5] * 4, 8), centre=0.5, count=8 * 0.552415)
    # Shares 1/4, 1/4, 1/2, 1: v = (3/8) / 12 = 1/32, so 8 plays of 16 times (t_15 = 2.131 / 3.182)^2
    assert_bounds(nested_rate_interval([0.25, 0.25, 0.5, 1.0], 16), centre=0.5, count=8 * 0.448506)
    # Two worlds tell so little of their difference that all their plays count as one.
    assert_bounds(nested_rate_interval([0.25, 0.75], 8), centre=0.5, count=1)
    assert_bounds(nested_rate_interval([0.5], 8), centre=0.5, count=1)


def assert_bounds(interval, *, centre, count):
    """The bounds of Wilson around a rate of 1/2: half of z / sqrt(n + z^2) to each side."""
    half = 1.959964 / 2 / math.sqrt(count + 1.959964**2)
    assert interval.mean == centre
    assert (interval.low, interval.high) == pytest.approx((centre - half, centre + half), abs=1e-6)


def test_worlds_that_were_all_solved_count_once_each_at_most():
    # 4 worlds times (2.201 / 3.182)^2 = 1.913817 plays, all of them solved: from n / (n + z^2)
    interval = nested_rate_interval([1.0] * 4, 12)
    assert (interval.mean, interval.high, interval.count) == (1.0, 1.0, 4)
    assert interval.low == pytest.approx(1.913817 / (1.913817 + 3.841459), abs=1e-6)
    with pytest.raises(ValueError, match="at least one world"):
        nested_rate_interval([], 0)


@pytest.mark.parametrize("worlds", [3, 6, 12])
def test_nineteen_of_twenty_intervals_of_a_few_worlds_hold_the_rate(worlds):
    # Half the spread lies between worlds: their rates are drawn from beta(0.3, 0.7), each played 5 times.
    source, rate, trials = random.Random(worlds), 0.3, 1500
    hits = 0
    for _ in range(trials):
        chances = [source.betavariate(0.3, 0.7) for _ in range(worlds)]
        shares = [sum(source.random() < chance for _ in range(5)) / 5 for chance in chances]
        interval = nested_rate_interval(shares, 5 * worlds)
        hits += interval.low <= rate <= interval.high
    assert hits / trials >= 0.935


def test_a_bound_that_cannot_be_is_cut_off():
    assert bounded(Interval(0.5, -1.0, 2.0, 3), 0.0, 22.0) == Interval(0.5, 0.0, 2.0, 3)
    assert bounded(Interval(0.5, None, None, 1), 0.0, 22.0).low is None


def test_a_difference_of_successes_by_hand():
    # three gains and one loss in eight worlds: p = 0.4, q = 0.2; half = z sqrt((0.6 - 0.04) / 10) = 0.463812
    interval = paired_success_interval([1.0] * 3 + [-1.0] + [0.0] * 4)
    assert (interval.mean, interval.count) == (0.25, 8)
    assert (interval.low, interval.high) == pytest.approx((0.2 - 0.463812, 0.2 + 0.463812), abs=1e-6)
    # no world differs: z sqrt(0.02 / 100), where Student's t has no width
    interval = paired_success_interval([0.0] * 98)
    assert (interval.mean, interval.low, interval.high) == pytest.approx((0.0, -0.027718, 0.027718), abs=1e-6)
    # one gain in one world: 1/3 + z sqrt(8/27) is more than a difference can be
    assert paired_success_interval([1.0]).high == 1.0
    with pytest.raises(ValueError, match="at least one world"):
        paired_success_interval([])
