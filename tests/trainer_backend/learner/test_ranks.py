"""How pieces are dealt out to the ranks of a learner."""

from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.learner.ranks import Ranks

COUNTS = st.integers(1, 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), COUNTS)
def test_each_piece_counts_on_one_rank_and_all_ranks_make_as_many_passes(sizes: list[int], count: int):
    dealt = [list(Ranks(index, count).dealt(list(enumerate(sizes)))) for index in range(count)]
    counted = [[piece for piece, counts in of_rank if counts] for of_rank in dealt]
    assert sorted(piece for of_rank in counted for piece in of_rank) == list(enumerate(sizes))
    assert len({len(of_rank) for of_rank in dealt}) == 1
    assert Ranks(0, count).dealt_sums(sizes) == [sum(size for _, size in of_rank) for of_rank in counted]
