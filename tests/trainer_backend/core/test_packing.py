from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.core.tries import pack
from trainer_backend.errors import BatchError


def test_each_sequence_goes_longest_first_to_the_fullest_row_with_room():
    # 6 and 5 open rows of 8; 3 fits beside 5 alone; 2 beside 6; 1 opens a row
    assert pack([3, 6, 1, 5, 2], row_tokens=8) == [[1, 4], [3, 0], [2]]


def test_equal_lengths_keep_their_order():
    assert pack([2, 2, 2, 2], row_tokens=4) == [[0, 1], [2, 3]]


def test_nothing_needs_no_row():
    assert pack([], row_tokens=4) == []


@given(st.lists(st.integers(1, 20), max_size=60))
def test_every_sequence_is_placed_once_no_row_overflows_and_no_two_rows_would_fit_in_one(lengths):
    rows = pack(lengths, row_tokens=20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    loads = [sum(lengths[i] for i in row) for row in rows]
    assert all(load <= 20 for load in loads)
    assert all(a + b > 20 for a, b in combinations(loads, 2))


@pytest.mark.parametrize("lengths", [[3, 9], [0]])
def test_a_sequence_that_no_row_can_take_is_refused(lengths):
    with pytest.raises(BatchError, match="a row takes 1 to 8"):
        pack(lengths, row_tokens=8)
