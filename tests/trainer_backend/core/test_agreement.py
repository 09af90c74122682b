"""How estimators differ on the same decisions, by hand."""

import pytest

from trainer_backend.core.agreement import correlation, measure_spread, sign_agreement


def test_mean_population_std_and_share_of_zeros():
    found = measure_spread([1.0, -1.0, 0.0, 0.0])
    assert (found.mean, found.std, found.zero_frac) == (0.0, pytest.approx(0.5**0.5), 0.5)


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
