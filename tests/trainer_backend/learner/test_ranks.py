"""How pieces are dealt out to the ranks of a learner."""

from hypothesis import given
from hypothesis import strategies as st

from tests.trainer_backend.learner.hand_made import tiny_tokenizer
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.shares import checksum_model
from trainer_backend.models import build_preset, train_tokenizer

COUNTS = st.integers(1, 5)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=12), COUNTS)
def test_each_piece_counts_on_one_rank_and_all_ranks_make_as_many_passes(sizes: list[int], count: int):
    dealt = [list(Ranks(index, count).own_pieces(list(enumerate(sizes)))) for index in range(count)]
    counted = [[piece for piece, counts in of_rank if counts] for of_rank in dealt]
    assert sorted(piece for of_rank in counted for piece in of_rank) == list(enumerate(sizes))
    assert len({len(of_rank) for of_rank in dealt}) == 1
    assert Ranks(0, count).sums_by_rank(sizes) == [sum(size for _, size in of_rank) for of_rank in counted]


def test_ranks_that_have_found_other_models_would_show_it():
    tokenizer = tiny_tokenizer()
    models = [build_preset("tiny-0.3m", tokenizer, seed=seed) for seed in (3, 3, 4)]
    samples = [checksum_model(model, tokenizer) for model in models]
    assert samples[0] == samples[1] != samples[2]
    other = train_tokenizer(["another text altogether"] * 20, 300)
    assert checksum_model(models[0], other) != samples[0]
