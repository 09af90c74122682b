"""The index of known prefixes, and what is kept: exact, bounded, least recently used first out."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainer_backend.inference.cache import RowCopy, SlotCache
from trainer_backend.inference.prefixes import (
    BLOCK,
    NOTHING,
    SHORTEST_PREFIX,
    Match,
    Prefix,
    Prefixes,
    PrefixIndex,
    shared_length,
)


def ids(length: int, seed: int = 0) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(1000) for _ in range(length)]


def make_index(*held: Prefix) -> PrefixIndex:
    index = PrefixIndex()
    for one in held:
        index.add(one)
    return index


def test_the_longest_prefix_is_exact_to_the_token():
    short, long = Prefix(ids(100)), Prefix(ids(150))  # the first 100 ids are the same
    index = make_index(short, long)
    assert index.longest(Prefix([*ids(131), 5000])) == Match(long, 131)
    assert index.longest(Prefix(ids(150) + ids(50, seed=1))) == Match(long, 150)
    assert index.longest(Prefix(ids(150)[:-20])) == Match(long, 130)
    assert index.longest(Prefix([5000, *ids(150)])) == NOTHING


def test_a_prefix_that_is_too_short_to_pay_is_not_found():
    index = make_index(Prefix(ids(500)))
    assert index.longest(Prefix([*ids(SHORTEST_PREFIX - 1), 5000])) == NOTHING
    assert index.longest(Prefix([*ids(SHORTEST_PREFIX), 5000])).length == SHORTEST_PREFIX


def test_what_was_removed_is_not_found_and_leaves_the_others():
    gone, stays = Prefix(ids(200)), Prefix(ids(100))
    index = make_index(gone, stays)
    index.remove(gone)
    assert index.longest(Prefix(ids(200))) == Match(stays, 100)


def test_equal_keys_of_other_ids_are_not_taken_for_equal_prefixes():
    held, wanted = Prefix(ids(100)), Prefix(ids(100, seed=1))
    wanted.block_keys = held.block_keys  # as if the hashes had met
    assert make_index(held).longest(wanted) == NOTHING


trees = st.lists(
    st.lists(st.sampled_from([0, 1]), min_size=1, max_size=7).map(
        lambda path: [branch for branch in path for _ in range(BLOCK - 1)]
    ),
    min_size=2,
    max_size=8,
)


@given(trees)
def test_less_than_a_block_of_the_longest_prefix_is_ever_missed(lists: list[list[int]]):
    *known, wanted = lists
    found = make_index(*map(Prefix, known)).longest(Prefix(wanted))
    longest = max(shared_length(one, wanted, at_least=0) for one in known)
    if found == NOTHING:
        assert longest < SHORTEST_PREFIX + BLOCK
    else:
        assert longest - BLOCK < found.length <= longest
        assert found.prefix is not None and found.prefix.ids[: found.length] == wanted[: found.length]


def filled_cache(slots: int = 4) -> SlotCache:
    """Two layers; every number of a row is the row's."""
    cache = SlotCache(slots=slots, max_len=256)
    cache.begin_prefill(first_row=0, length=200)
    rows = torch.arange(slots, dtype=torch.float32)[:, None, None, None].expand(slots, 2, 200, 3)
    for layer in range(2):
        cache.update(rows, -rows, layer)
    return cache


def run_and_end(prefixes: Prefixes, row: int, prompt: list[int], sampled: list[int]) -> None:
    held = Prefix(prompt)
    prefixes.start_row(held, row)
    prefixes.end_row(held, row, prompt + sampled)


def known(prefixes: Prefixes, wanted: list[int]) -> int:
    return prefixes.find(Prefix(wanted)).length


def test_a_prompt_is_filled_from_a_row_or_from_a_copy():
    cache = filled_cache()
    prefixes, held = Prefixes(cache, most=4), Prefix(ids(100))
    prefixes.start_row(held, 2)
    assert prefixes.fill(prefixes.find(held), 0, room=200) == 100
    row = cache.copy_out(0, 101).tensors
    assert row[1][:, :100].unique().tolist() == [2.0] and row[1][:, 100].unique().tolist() == [0.0]
    prefixes.end_row(held, 2, ids(100))
    assert prefixes.fill(prefixes.find(held), 1, room=200) == 100
    assert cache.copy_out(1, 100).tensors[2].unique().tolist() == [-2.0]


def test_the_least_recently_used_prefix_goes_first():
    prefixes = Prefixes(filled_cache(), most=2)
    for seed in (0, 1):
        run_and_end(prefixes, seed, ids(100, seed), [])
    prefixes.fill(prefixes.find(Prefix(ids(100, seed=0))), 3, room=200)  # used: now 1 is the oldest
    run_and_end(prefixes, 2, ids(100, seed=2), [])
    assert [known(prefixes, ids(100, seed)) for seed in (0, 1, 2)] == [100, 0, 100]


def test_a_conversation_takes_one_place_however_many_turns_it_has():
    prefixes = Prefixes(filled_cache(), most=4)
    for length in (100, 120, 150):
        run_and_end(prefixes, 0, ids(length), ids(5, seed=length))
    assert len(prefixes.copies) == 3, "branches: the next prompt does not hold what was sampled"
    for length in (100, 120, 150):
        run_and_end(prefixes, 0, ids(200, seed=7)[:length], ids(200, seed=7)[length : length + 10])
    assert len(prefixes.copies) == 4 and known(prefixes, ids(200, seed=7)) == 160


def test_what_is_kept_already_is_not_kept_twice():
    prefixes = Prefixes(filled_cache(), most=4)
    for length in (120, 120, 110):
        run_and_end(prefixes, 0, ids(length), [])
    assert len(prefixes.copies) == 1 and known(prefixes, ids(200)) == 120


def test_without_a_place_nothing_is_kept_or_found():
    prefixes, held = Prefixes(filled_cache(), most=0), Prefix(ids(100))
    prefixes.start_row(held, 0)
    assert known(prefixes, ids(100)) == 0
    prefixes.end_row(held, 0, ids(100))
    assert len(prefixes.copies) == 0


class FullCache(SlotCache):
    """No memory is left for a copy."""

    def copy_out(self, row: int, length: int) -> RowCopy:
        raise torch.OutOfMemoryError("no memory left")


def test_where_there_is_no_memory_for_a_copy_the_others_go_too():
    cache = filled_cache()
    prefixes = Prefixes(cache, most=4)
    run_and_end(prefixes, 0, ids(100), [])
    assert len(prefixes.copies) == 1
    cache.__class__ = FullCache
    run_and_end(prefixes, 0, ids(100, seed=1), [])
    assert len(prefixes.copies) == 0 and known(prefixes, ids(100)) == 0


def test_another_fault_while_copying_is_not_hidden():
    prefixes = Prefixes(SlotCache(slots=1, max_len=256), most=4)
    prefixes._cache.copy_out = lambda row, length: (_ for _ in ()).throw(RuntimeError("other"))
    with pytest.raises(RuntimeError, match="other"):
        run_and_end(prefixes, 0, ids(100), [])


def held_whole(place: object, length: int) -> bool:
    return place != "gone on"


def test_of_what_cannot_be_cut_the_longest_that_is_whole_is_found():
    short, long, other = Prefix(ids(100)), Prefix(ids(120)), Prefix(ids(140))
    index = make_index(short, long, other)
    assert index.longest_whole(Prefix(ids(130)), held_whole) == Match(long, 120)
    assert index.longest_whole(Prefix(ids(119)), held_whole) == Match(short, 100)
    assert index.longest_whole(Prefix(ids(99)), held_whole) == NOTHING
    long.place = "gone on"
    assert index.longest_whole(Prefix(ids(130)), held_whole) == Match(short, 100)


@given(trees)
def test_what_is_found_whole_is_the_longest_of_all_that_begin_a_prompt(lists: list[list[int]]):
    *known, wanted = lists
    found = make_index(*map(Prefix, known)).longest_whole(Prefix(wanted), held_whole)
    whole = [one for one in known if wanted[: len(one)] == one and len(one) >= SHORTEST_PREFIX]
    assert found.length == max(map(len, whole), default=0)


class UncutCache(SlotCache):
    """Its rows are states: none can be cut. Row 3 has gone on."""

    cuts = False

    def holds(self, place: int | RowCopy, length: int) -> bool:
        return place != 3


def uncut(most: int) -> Prefixes:
    cache = filled_cache()
    cache.__class__ = UncutCache
    return Prefixes(cache, most=most)


def test_where_a_prompt_parts_from_a_known_one_a_mark_is_due_at_the_end_of_the_block_before():
    prefixes, held = uncut(most=4), Prefix(ids(200))
    prefixes.start_row(held, 3)
    assert prefixes.find(Prefix([*ids(110), 5000])) == Match(None, 0, lost=110, mark=96)
    assert prefixes.find(Prefix(ids(110))) == Match(None, 0, lost=110, mark=110), "all of the prompt"
    assert prefixes.find(Prefix(ids(250))) == Match(None, 0, lost=200, mark=200), "all of the known one"
    prefixes.mark(Prefix(ids(96)), 0)
    found = prefixes.find(Prefix([*ids(140), 5000]))
    assert (found.length, found.lost, found.mark) == (96, 140 - 96, 128)


def test_ends_of_turns_replace_one_another_and_leave_the_marks():
    prefixes = uncut(most=2)
    prefixes.mark(Prefix(ids(96)), 0)
    for length in (110, 130, 150):
        run_and_end(prefixes, 0, ids(length), [])
    assert sorted(len(copy.ids) for copy in prefixes.copies) == [96, 150]
    for seed in (1, 2, 3):
        prefixes.mark(Prefix(ids(100, seed)), 0)
    assert [len(copy.ids) for copy in prefixes.copies] == [150, 100, 100], "as many marks as ends"
