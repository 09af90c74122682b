"""Pages: what is seen through a row's pages is what was written to it, whoever else shares them."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from trainer_backend.inference.pages import PAGE, PagePool, choose_victim, pages_for
from trainer_backend.inference.prefixes import BLOCK

SLAB, LIMIT = 4, 14


class Machine:
    """A pool over lists of tokens in place of tensors, and kept prefixes in the order of their use."""

    def __init__(self, limit: int = LIMIT) -> None:
        self.contents: list[list[int | None]] = []
        self.kept: list[tuple[list[int], list[int]]] = []  # pages, tokens
        self.pool = PagePool(limit, grow=self.grow, evict=self.evict, copy=self.copy)

    def grow(self, most: int) -> int:
        added = min(SLAB, most)
        self.contents.extend([None] * PAGE for _ in range(added))
        return added

    def evict(self) -> bool:
        if not self.kept:
            return False
        self.pool.drop(self.kept.pop(0)[0])
        return True

    def copy(self, source: int, target: int) -> None:
        self.contents[target] = list(self.contents[source])

    def write(self, pages: list[int], position: int, token: int) -> None:
        page = pages[position // PAGE]
        assert self.pool.references[page] == 1, "a page that others see is never written in"
        self.contents[page][position % PAGE] = token

    def seen(self, pages: list[int], length: int) -> list[int | None]:
        return [self.contents[pages[i // PAGE]][i % PAGE] for i in range(length)]

    def keep(self, pages: list[int], tokens: list[int]) -> None:
        kept = pages[: pages_for(len(tokens))]
        self.pool.refer(kept)
        self.kept.append((kept, tokens))


class AnyOrder(RuleBasedStateMachine):
    """Joins, shares, growth, ends and kept prefixes in any order, beside plain lists of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.machine = Machine()
        self.rows: list[tuple[list[int], list[int]]] = []  # pages, tokens
        self.token = 0

    def fill(self, pages: list[int], tokens: list[int], count: int) -> None:
        for _ in range(count):
            self.token += 1
            self.machine.write(pages, len(tokens), self.token)
            tokens.append(self.token)

    @rule(new=st.integers(1, 3 * PAGE), draw=st.randoms(use_true_random=False))
    def join(self, new: int, draw) -> None:
        sources = [*self.rows, *self.machine.kept]
        source, tokens = draw.choice(sources) if sources and draw.random() < 0.7 else ([], [])
        shared = draw.randint(0, len(tokens))
        begun = list(tokens[:shared])  # before the source may be evicted
        pages = self.machine.pool.begin(source, shared, room=shared + new)
        if pages is not None:
            assert len(pages) == pages_for(shared + new)
            self.fill(pages, begun, new)
            self.rows.append((pages, begun))

    @precondition(lambda self: self.rows)
    @rule(draw=st.randoms(use_true_random=False), new=st.integers(1, 2 * PAGE))
    def go_on(self, draw, new: int) -> None:
        pages, tokens = draw.choice(self.rows)
        before = list(pages)
        if self.machine.pool.extend(pages, len(tokens) + new):
            self.fill(pages, tokens, new)
        else:
            assert pages == before

    @precondition(lambda self: self.rows)
    @rule(draw=st.randoms(use_true_random=False), kept=st.booleans())
    def end(self, draw, kept: bool) -> None:
        pages, tokens = self.rows.pop(draw.randrange(len(self.rows)))
        if kept:
            self.machine.keep(pages, tokens)
        self.machine.pool.drop(pages)

    @invariant()
    def every_row_and_prefix_sees_its_own_tokens(self) -> None:
        for pages, tokens in [*self.rows, *self.machine.kept]:
            assert self.machine.seen(pages, len(tokens)) == tokens

    @invariant()
    def every_page_is_free_or_has_as_many_owners_as_refer_to_it(self) -> None:
        lists = [pages for pages, _ in [*self.rows, *self.machine.kept]]
        owned = {page for pages in lists for page in pages}
        assert self.machine.pool.used == len(owned)
        assert all(self.machine.pool.references[page] == sum(page in one for one in lists) for page in owned)
        assert self.machine.pool.allocated <= LIMIT

    def teardown(self) -> None:
        for pages, _ in [*self.rows, *self.machine.kept]:
            self.machine.pool.drop(pages)
        self.machine.pool.clear()
        assert self.machine.pool.allocated == 0


AnyOrder.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestAnyOrder = AnyOrder.TestCase


def test_a_page_has_a_block_of_the_index():
    assert PAGE == BLOCK


def test_memory_is_allocated_as_rows_need_it_and_no_more_than_the_limit():
    machine = Machine(limit=6)
    first = machine.pool.begin([], 0, room=PAGE)
    assert (machine.pool.allocated, machine.pool.used) == (4, 1)
    assert machine.pool.extend(first, 5 * PAGE + 1)
    assert (machine.pool.allocated, machine.pool.used) == (6, 6)
    assert not machine.pool.extend(first, 6 * PAGE + 1)
    assert machine.pool.begin([], 0, room=1) is None


def test_siblings_share_whole_pages_and_copy_the_last():
    machine = Machine()
    prompt = machine.pool.begin([], 0, room=2 * PAGE + 5)
    for position in range(2 * PAGE + 5):
        machine.write(prompt, position, position)
    sibling = machine.pool.begin(prompt, 2 * PAGE + 5, room=2 * PAGE + 6)
    assert sibling[:2] == prompt[:2]
    assert sibling[2] != prompt[2]
    machine.write(sibling, 2 * PAGE + 5, -1)
    machine.write(prompt, 2 * PAGE + 5, -2)
    assert machine.seen(sibling, 2 * PAGE + 6) == [*range(2 * PAGE + 5), -1]


def test_a_prefix_that_is_evicted_to_make_room_for_its_own_reader_is_read_first():
    machine = Machine(limit=3)
    for first in (10, 20):
        pages = machine.pool.begin([], 0, room=5)
        for position in range(5):
            machine.write(pages, position, first + position)
        machine.keep(pages, [*range(first, first + 5)])
        machine.pool.drop(pages)
    # Two pages are needed and one is free: both prefixes go; the reader holds its own one until it is read.
    row = machine.pool.begin(machine.kept[0][0], 5, room=PAGE + 1)
    assert machine.kept == []
    assert machine.seen(row, 5) == [10, 11, 12, 13, 14]
    assert machine.pool.used == 2


def test_slabs_that_cannot_be_allocated_are_no_room():
    pool = PagePool(8, grow=lambda most: 0, evict=lambda: False, copy=lambda source, target: None)
    assert pool.begin([], 0, room=1) is None
    assert pool.begin([], 0, room=0) == []


def test_memory_is_not_given_back_under_a_row():
    machine = Machine()
    machine.pool.begin([], 0, room=1)
    with pytest.raises(AssertionError, match="1 pages are in use"):
        machine.pool.clear()


def test_the_youngest_row_makes_room_and_the_last_one_cannot():
    assert choose_victim([3, 7, 5]) == 1
    assert choose_victim([3]) is None
