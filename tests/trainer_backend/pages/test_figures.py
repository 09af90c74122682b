"""Numbers as a person reads them."""

from datetime import UTC, datetime, timedelta

import pytest

from trainer_backend.pages.figures import ago, duration, number, roughly, signed, size

NOON = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("value", "form", "told"),
    [
        (None, "number", "–"),  # noqa: RUF001
        (0.0, "number", "0"),
        (8.484375, "number", "8.48"),
        (0.0312, "number", "0.0312"),
        (10.0, "number", "10"),
        (100.0, "number", "100"),
        (999.6, "number", "1000"),
        (2932.0, "number", "2,932"),
        (-0.5, "number", "-0.5"),
        (7.625, "number", "7.63"),  # as in JavaScript
        (1234.5, "number", "1,235"),
        (2.0**70, "number", "1,180,591,620,717,411,303,424"),
        (2.3e-7, "number", "2.3e-07"),
        (0.1524, "percent", "15.2 %"),
        (1.0, "percent", "100 %"),
        (12.2995, "seconds", "12.3 s"),
    ],
)
def test_a_value_has_three_digits_that_count(value, form, told):
    assert number(value, form) == told


def test_rewards_show_their_sign_and_a_zero_has_none():
    assert [signed(value) for value in (0.5, -2.0, 0.0, None)] == ["+0.5", "−2", "0", "–"]  # noqa: RUF001


def test_a_duration_has_its_two_largest_units_an_estimate_one_and_bytes_one():
    assert [duration(seconds) for seconds in (0, 45, 200, 3600, 7500, 273_600)] == [
        "0 s", "45 s", "3 min 20 s", "1 h", "2 h 5 min", "3 d 4 h",
    ]  # fmt: skip
    estimates = [roughly(seconds) for seconds in (45, 119, 120, 1435, 9_000)]
    assert estimates == ["45 s", "119 s", "2 min", "24 min", "2 h"]
    assert [size(count) for count in (512, 1_258_291, 3 * 2**30)] == ["512 B", "1.2 MiB", "3.0 GiB"]


def test_a_moment_is_told_by_its_largest_unit_and_one_that_is_yet_to_come_is_just_now():
    told = [ago(NOON - timedelta(seconds=seconds), NOON) for seconds in (-10, 2, 45, 200, 7500)]
    assert told == ["just now", "just now", "45 s ago", "3 min ago", "2 h ago"]
