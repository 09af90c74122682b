"""Count the references to the pages of a paged cache. Pages are numbers here; no tensors are involved.

A page stores the keys and values of PAGE tokens. A row, and a kept prefix, is a list of pages in order. The
full pages of a shared prefix belong to all rows that share it, and are never written again. A partly filled
last page is copied for each row that continues the prefix.

Pages are allocated in slabs, when no page is free and the limit is not reached. If no slab can be allocated,
kept prefixes are evicted, the least recently used first. If no prefix is left, `PagePool` reports that there
is no room. The caller then preempts a row (`choose_victim`), which is computed again later.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention, SOSP
2023, sections 4.2 to 4.5.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

# The number of tokens of a page. It equals the length of a block of the prefix index (`prefixes.BLOCK`),
# because prefixes are found by whole blocks and shared by whole pages. A row wastes half a page on average,
# 5 % of 300 tokens. The kernel reads several pages at a time; smaller pages would only lengthen the page
# tables that each step sends to the device.
PAGE = 32


def pages_for(tokens: int) -> int:
    return -(-tokens // PAGE)


class PagePool:
    """Allocates pages by number and counts the owners of each page. Only the engine thread uses the pool.

    Args:
        limit: the largest number of pages.
        grow: allocates the next slab and returns how many of its pages may be used, at most as many as the
            argument says; returns 0 if the device has no memory for a slab.
        evict: drops one kept prefix (by `drop`) and returns True; returns False if no prefix is left.
        copy: copies the contents of the first page to the second, before later writes to either page.
    """

    def __init__(
        self,
        limit: int,
        *,
        grow: Callable[[int], int],
        evict: Callable[[], bool],
        copy: Callable[[int, int], None],
    ) -> None:
        self.limit = limit
        self._grow, self._evict, self._copy = grow, evict, copy
        self._free: list[int] = []  # a heap: the lowest number is used first, so that used pages lie together
        self.references: list[int] = []

    @property
    def allocated(self) -> int:
        """Return the number of pages that have device memory, in use or free."""
        return len(self.references)

    @property
    def used(self) -> int:
        return len(self.references) - len(self._free)

    def begin(self, source: Sequence[int], shared: int, *, room: int) -> list[int] | None:
        """Return the pages of a new row that has room for `room` tokens.

        The row begins with `shared` tokens, which are the first tokens in the pages `source`. It shares the
        full pages of these tokens, and gets a copy of the partly filled page. Return None if there is no
        room; kept prefixes may have been evicted even then.
        """
        whole, partly = divmod(shared, PAGE)
        # Become an owner of the pages first, because making room may evict the source itself.
        held = list(source[: pages_for(shared)])
        self.refer(held)
        own = self._take(pages_for(room) - whole)
        if own is None:
            self.drop(held)
            return None
        if partly:
            self._copy(held[whole], own[0])
        self.drop(held[whole:])
        return held[:whole] + own

    def extend(self, pages: list[int], tokens: int) -> bool:
        """Add pages to a row, so that it has room for `tokens` tokens in all.

        Return False, and leave the row unchanged, if there is no room.
        """
        missing = pages_for(tokens) - len(pages)
        own = self._take(missing) if missing > 0 else []
        if own is None:
            return False
        pages.extend(own)
        return True

    def refer(self, pages: Iterable[int]) -> None:
        """Add one owner of each page."""
        for page in pages:
            self.references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Remove one owner of each page; pages without an owner are free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} has no owner"
            self.references[page] -= 1
            if not self.references[page]:
                heappush(self._free, page)

    def clear(self) -> None:
        """Forget all pages, because their memory is freed. No page may have an owner."""
        assert not self.used, f"{self.used} pages are in use"
        self._free.clear()
        self.references.clear()

    def _take(self, count: int) -> list[int] | None:
        while len(self._free) < count:
            if not self._add_slab() and not self._evict():
                return None
        own = [heappop(self._free) for _ in range(count)]
        self.refer(own)
        return own

    def _add_slab(self) -> bool:
        more = self.limit - self.allocated
        added = self._grow(more) if more > 0 else 0
        self._free.extend(range(self.allocated, self.allocated + added))
        heapify(self._free)
        self.references.extend([0] * added)
        return added > 0


def choose_victim(arrivals: Sequence[int]) -> int | None:
    """Return the index of the row to preempt, or None if there are fewer than two rows.

    The row that arrived last is preempted, so that the oldest row always finishes.
    """
    if len(arrivals) < 2:
        return None
    return max(range(len(arrivals)), key=lambda row: arrivals[row])
