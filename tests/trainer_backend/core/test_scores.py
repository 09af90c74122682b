import math
import random

import pytest

from trainer_backend.core.intervals import crafter_score_interval


def score_of(counts):
    """Of episodes of a world each."""
    return crafter_score_interval(counts, [str(number) for number in range(len(counts))])


def test_one_achievement_has_the_score_of_wilsons_bounds_and_the_bias_above():
    # 1 of 2: Wilson's 0.094531 to 0.905469; the bias, ln 51 - (ln 1 + ln 101) / 2, lifts the bound over 100
    found = score_of([{"a": 3}, {"a": 0}])
    assert (found.mean, found.low, found.high) == pytest.approx((50.0, 9.4531, 100.0), abs=1e-4)
    # 1 of 100: 0.001767 to 0.054487; exp of the bias, 99 (ln 2 - 0.99 ln(1 + 100/99)) = 0.192467, is 1.212236
    found = score_of([{"a": number == 0} for number in range(100)])
    assert (found.mean, found.low) == pytest.approx((1.0, 0.17674), abs=1e-5)
    assert found.high == pytest.approx(6.44865 * 1.212236 - 1, abs=1e-4)


def test_what_was_always_unlocked_lowers_the_bound_and_nothing_raises_it():
    # Wilson's for 100 of 100: 100 / (100 + z^2) = 0.963006; three distances add as those of independent rates
    distance = math.sqrt(3) * (math.log(101) - math.log(97.3006)) / 3
    found = score_of([{"a": 1, "b": 1, "c": 1}] * 100)
    assert found.low == pytest.approx(101 * math.exp(-distance) - 1, abs=1e-4)
    assert found.high == pytest.approx(100.0)


def test_what_was_never_unlocked_counts_together_where_that_says_more():
    def never(count):
        return [dict.fromkeys((f"n{number}" for number in range(count)), 0)] * 100

    assert (score_of(never(1)).mean, score_of(never(1)).low) == (0.0, 0.0)
    assert score_of(never(1)).high == pytest.approx(100 * 3.841459 / 103.841459)  # z^2 / (n + z^2), Wilson's
    assert score_of(never(2)).high == pytest.approx(
        3.841459 / 2
    )  # two rates with the sum z^2 / n, in percent


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
    found = score_of([{"a": number == 0, "z": 1, **never} for number in range(100)])
    # the rate of the one is 5.448652 % at most; the bias is the one of above
    expected = math.log(2 * 101) + math.hypot(math.log(6.448652 / 2), distance) + 0.192467
    assert found.high == pytest.approx(math.expm1(expected / (2 + len(unseen))), rel=1e-5)


def test_two_plays_of_a_world_say_little_more_of_the_unseen_than_one():
    # an effective count of 2 (t_3 / t_1)^2 = 0.13, raised to 1: z^2 / (1 + z^2)
    found = crafter_score_interval([{"a": 0}] * 4, ["v", "v", "w", "w"])
    assert found.high == pytest.approx(100 * 3.841459 / 4.841459)


def test_the_score_is_that_of_the_rates():
    found = score_of([{"a": 1, "b": number % 2, "c": 0} for number in range(40)])
    assert found.mean == pytest.approx((101 * 51) ** (1 / 3) - 1)  # rates 1, 1/2 and 0
    assert found.count == 40


def test_achievements_that_come_together_widen_the_interval():
    # the same rates, 1/2 and 1/2: unlocked in the same episodes, or never in the same one
    together = score_of([{"a": x, "b": x} for x in (0, 1)] * 10)
    apart = score_of([{"a": x, "b": 1 - x} for x in (0, 1)] * 10)
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


def test_the_interval_contains_the_score_where_achievements_are_rare():
    # 4d960597:bench/score_coverage.py has the real ones; the delta method held it in 0.77 of these
    rates = dict(zip("abcdefghijklmno", [0.97, 0.9, 0.6, 0.2, 0.05] + [0.01] * 8 + [0.0] * 2, strict=True))
    truth = math.expm1(sum(math.log1p(100 * rate) for rate in rates.values()) / len(rates))
    draw = random.Random(0)
    held = 0
    for _ in range(150):
        found = score_of([{name: draw.random() < rate for name, rate in rates.items()} for _ in range(100)])
        held += found.low <= truth <= found.high
    assert held / 150 >= 0.93


def test_published_corner_cases():
    names = [f"a{number}" for number in range(22)]
    all_of_them = dict.fromkeys(names, 1)
    assert score_of([all_of_them]).mean == pytest.approx(100.0)
    half = {name: int(number < 11) for number, name in enumerate(names)}
    found = score_of([half])
    assert (round(found.mean, 2), found.low, found.count) == (9.05, None, 1)
    one = {name: int(number == 0) for number, name in enumerate(names)}
    assert round(score_of([one]).mean, 3) == 0.233


def test_nothing_has_no_score():
    for counts in ([], [{}]):
        with pytest.raises(ValueError, match="needs episodes"):
            score_of(counts)
