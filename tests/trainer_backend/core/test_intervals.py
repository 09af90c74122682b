"""Intervals of rates and of the Crafter score, and agreement of estimators, worked by hand."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.agreement import correlation, sign_agreement
from trainer_backend.core.intervals import (
    crafter_score_interval,
    nested_rate_interval,
    paired_success_interval,
    wilson_interval,
)
from trainer_backend.core.statistics import Interval, bounded


def score(counts):
    """Of episodes of a world each."""
    return crafter_score_interval(counts, [str(number) for number in range(len(counts))])


def test_one_achievement_has_the_score_of_wilsons_bounds_and_the_bias_above():
    # 1 of 2: Wilson's 0.094531 to 0.905469; the bias, ln 51 - (ln 1 + ln 101) / 2, lifts the bound over 100
    found = score([{"a": 3}, {"a": 0}])
    assert (found.mean, found.low, found.high) == pytest.approx((50.0, 9.4531, 100.0), abs=1e-4)
    # 1 of 100: 0.001767 to 0.054487; exp of the bias, 99 (ln 2 - 0.99 ln(1 + 100/99)) = 0.192467, is 1.212236
    found = score([{"a": number == 0} for number in range(100)])
    assert (found.mean, found.low) == pytest.approx((1.0, 0.17674), abs=1e-5)
    assert found.high == pytest.approx(6.44865 * 1.212236 - 1, abs=1e-4)


def test_what_was_always_unlocked_lowers_the_bound_and_nothing_raises_it():
    # Wilson's for 100 of 100: 100 / (100 + z^2) = 0.963006; three distances add as those of independent rates
    distance = math.sqrt(3) * (math.log(101) - math.log(97.3006)) / 3
    found = score([{"a": 1, "b": 1, "c": 1}] * 100)
    assert found.low == pytest.approx(101 * math.exp(-distance) - 1, abs=1e-4)
    assert found.high == pytest.approx(100.0)


def test_what_was_never_unlocked_counts_together_where_that_says_more():
    def never(count):
        return [dict.fromkeys((f"n{number}" for number in range(count)), 0)] * 100

    assert (score(never(1)).mean, score(never(1)).low) == (0.0, 0.0)
    assert score(never(1)).high == pytest.approx(100 * 3.841459 / 103.841459)  # z^2 / (n + z^2), Wilson's
    assert score(never(2)).high == pytest.approx(3.841459 / 2)  # two rates with the sum z^2 / n, in percent


@pytest.mark.parametrize(
    ("unseen", "distance"),
    [
        # their rates add to at most (1 + z^2 / 2 + z sqrt(1 + z^2 / 4)) / n = 5.664934 %, which says more
        ("bcdefghijk", 10 * math.log1p(0.5664934)),
        ("bc", math.sqrt(2) * math.log1p(3.699351)),
    ],
)
def test_what_exactly_one_world_saw_says_how_much_the_unseen_may_be(unseen, distance):
    never = dict.fromkeys(unseen, 0)
    found = score([{"a": number == 0, "z": 1, **never} for number in range(100)])
    # the rate of the one is 5.448652 % at most; the bias is the one of above
    expected = math.log(2 * 101) + math.hypot(math.log(6.448652 / 2), distance) + 0.192467
    assert found.high == pytest.approx(math.expm1(expected / (2 + len(unseen))), rel=1e-5)


def test_two_plays_of_a_world_say_little_more_of_the_unseen_than_one():
    # an effective count of 2 (t_3 / t_1)^2 = 0.13, raised to 1: z^2 / (1 + z^2)
    found = crafter_score_interval([{"a": 0}] * 4, ["v", "v", "w", "w"])
    assert found.high == pytest.approx(100 * 3.841459 / 4.841459)


def test_the_score_is_that_of_the_rates():
    found = score([{"a": 1, "b": number % 2, "c": 0} for number in range(40)])
    assert found.mean == pytest.approx((101 * 51) ** (1 / 3) - 1)  # rates 1, 1/2 and 0
    assert found.count == 40


def test_achievements_that_come_together_widen_the_interval():
    # the same rates, 1/2 and 1/2: unlocked in the same episodes, or never in the same one
    together = score([{"a": x, "b": x} for x in (0, 1)] * 10)
    apart = score([{"a": x, "b": 1 - x} for x in (0, 1)] * 10)
    assert together.mean == pytest.approx(apart.mean)
    # correlations of 0.95 and -0.95, 1 less a twentieth: squared distances 2 + 1.9 and 2 - 1.9
    below_together, below_apart = (math.log(51) - math.log1p(found.low) for found in (together, apart))
    assert below_together / below_apart == pytest.approx(math.sqrt(39))


def test_the_score_is_that_of_the_rates_of_worlds_however_often_each_was_played():
    # "a": always in the first world, played once; in one of three plays of the second: rate 2/3, and not 1/2
    interval = crafter_score_interval([{"a": 1}, {"a": 1}, {"a": 0}, {"a": 0}], ["v", "w", "w", "w"])
    assert (interval.mean, interval.count) == (pytest.approx(200 / 3), 2)
    # Wilson's of an effective count of 1: (2/3 + 1.920729 - z sqrt(2/9 + 0.960365)) / 4.841459 = 0.094187
    assert interval.low == pytest.approx(9.4187, abs=1e-3)


def test_nothing_has_no_score():
    for counts in ([], [{}]):
        with pytest.raises(ValueError, match="needs episodes"):
            score(counts)


@pytest.mark.parametrize(
    ("successes", "bounds"),
    [
        # z = 1.96: centre (0.5 + 0.19207) / 1.38415 = 0.5; half = z / 1.38415 * sqrt(0.025 + 0.0096) = 0.2634
        (5, (0.23659, 0.76341)),
        (0, (0.0, 0.27753)),  # z^2 / (n + z^2) = 3.8415 / 13.8415
    ],
)
def test_some_and_none_of_ten_by_hand(successes, bounds):
    interval = wilson_interval(successes, 10)
    assert (interval.mean, interval.count) == (successes / 10, 10)
    assert (interval.low, interval.high) == pytest.approx(bounds, abs=1e-5)


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
    none = nested_rate_interval([0.0] * 4, 12)
    assert (none.low, none.high) == (0.0, pytest.approx(1 - interval.low))
    with pytest.raises(ValueError, match="at least one world"):
        nested_rate_interval([], 0)


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


def test_correlation_is_1_for_a_scaled_copy_and_minus_1_for_its_opposite():
    values = [1.0, 2.0, 4.0]
    assert correlation(values, [3 * value + 1 for value in values]) == pytest.approx(1.0)
    assert correlation(values, [-value for value in values]) == pytest.approx(-1.0)


def test_a_constant_has_no_correlation():
    assert correlation([1.0, 2.0], [5.0, 5.0]) is None
    assert correlation([0.1 + 0.2, 0.3], [1.0, 2.0]) is None, "the two differ by rounding alone"


def test_signs_are_compared_where_neither_is_0():
    assert sign_agreement([1.0, -1.0, 0.0, 2.0], [2.0, 3.0, 1.0, 0.0]) == 0.5
    assert sign_agreement([0.0], [1.0]) is None
