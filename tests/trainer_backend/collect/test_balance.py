"""Shares of task apps by hand, and what holds of any."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.collect.balance import Load, choose, fair_shares

MANY = 1_000


@pytest.mark.parametrize(
    ("places", "seconds", "at_most", "shares"),
    [
        (64, [None, None], [MANY] * 2, [32, 32]),
        (3, [None, None], [MANY] * 2, [2, 1]),
        (1, [None, None], [MANY] * 2, [1, 0]),
        # three times as slow: 6 places would take the fast one 6 s, 2 the slow one 6 s
        (8, [1.0, 3.0], [MANY] * 2, [6, 2]),
        # never nothing, or it could not show that it has become fast
        (8, [1.0, 1_000.0], [MANY] * 2, [7, 1]),
        # what is not known yet is taken for the mean of the others
        (9, [1.0, None, 1.0], [MANY] * 3, [3, 3, 3]),
        # a bound of its own; the rest is the other's
        (10, [1.0, 1.0], [2, MANY], [2, 8]),
        (10, [1.0, 1.0], [2, 3], [2, 3]),
    ],
)
def test_shares_by_hand(places, seconds, at_most, shares):
    assert fair_shares(places, seconds, at_most, [1.0] * len(seconds)) == shares


def test_half_the_trust_is_half_the_speed():
    assert (
        fair_shares(9, [1.0, 1.0], [MANY] * 2, [1.0, 0.5])
        == [6, 3]
        == fair_shares(9, [1.0, 2.0], [MANY] * 2, [1.0] * 2)
    )


@given(
    st.integers(1, 100),
    st.lists(
        st.tuples(st.none() | st.floats(0, 1e6, allow_nan=False), st.integers(1, 80)), min_size=1, max_size=6
    ),
)
def test_every_place_is_given_unless_every_app_is_at_its_bound(places, apps):
    seconds, at_most = zip(*apps, strict=True)
    shares = fair_shares(places, seconds, at_most, [1.0] * len(apps))
    assert sum(shares) == min(places, sum(at_most))
    assert all(share <= bound for share, bound in zip(shares, at_most, strict=True))
    assert min(shares) >= 1 or places < len(apps)


def test_a_group_stays_whole_even_a_little_beyond_the_share():
    # 22 of 64 places each and groups of 8: the third group goes to the first app as a whole
    loads = [Load(16, 22, MANY), Load(16, 21, MANY), Load(16, 21, MANY)]
    assert choose(8, None, loads) == (0, 14)
    # and siblings follow theirs, while one more group beyond the share is not reached
    loads = [Load(24, 22, MANY), Load(16, 21, MANY), Load(16, 21, MANY)]
    assert choose(8, 0, loads) == (0, 6)
    loads = [Load(30, 22, MANY), Load(16, 21, MANY), Load(16, 21, MANY)]
    assert choose(8, 0, loads) == (1, 13)


def test_a_group_that_no_share_holds_is_split():
    assert choose(10, None, [Load(0, 2, MANY), Load(0, 1, MANY)]) == (0, 2)
    assert choose(10, 0, [Load(2, 2, MANY), Load(0, 1, MANY)]) == (1, 1)
    assert choose(10, 0, [Load(2, 2, MANY), Load(1, 1, MANY)]) is None


def test_an_app_runs_no_more_than_it_can():
    assert choose(8, 0, [Load(4, 8, 6), Load(0, 8, 6)]) == (0, 2)
    assert choose(8, 0, [Load(6, 8, 6), Load(0, 8, 6)]) == (1, 6)
    assert choose(8, None, [Load(6, 8, 6)]) is None
    assert choose(8, None, []) is None
