"""Which pages of the cache are free, and who refers to each: book-keeping without tensors.

Keys and values of PAGE tokens lie in a page. A row, or a kept prefix, is the list of its pages in order.
Full pages of a shared prefix belong to all rows that share it, and are never written again. A partly filled
last page is copied for each row that continues it.

Pages come in slabs, which are allocated when no page is free, and never more than the limit. When none can be
allocated, kept prefixes are evicted, the least recently used first, and after that rows wait: `PagePool` then
says that there is no room, and the caller preempts a row (`victim`), which is computed again later.

Source: Kwon et al., Efficient Memory Management for Large Language Model Serving with PagedAttention,
SOSP 2023, sections 4.2 to 4.5.
"""

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush

# Tokens of a page. As many as of a block of the index of prefixes (`prefixes.BLOCK`): what it finds by whole
# blocks is shared by whole pages. A row wastes half a page on average, 5 % of 300 tokens. The kernel does not
# care, it reads tiles of several pages; smaller pages would only lengthen the tables that each step sends.
PAGE = 32


def pages_for(tokens: int) -> int:
    """Return the number of pages that so many tokens take."""
    return -(-tokens // PAGE)


class PagePool:
    """Pages by number and their references. Belongs to the engine thread.

    Args:
        limit: the most pages.
        grow: allocates the next slab and returns the number of its pages, at most what it is given; 0 if the
            memory of the device does not allow one.
        evict: drops one kept prefix (`drop`), and returns False if there is none.
        copy: copies the contents of a page to another page, before either is written.
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
        self._free: list[int] = []  # a heap: low numbers first, which keeps the pages in use together
        self.references: list[int] = []

    @property
    def allocated(self) -> int:
        """The number of pages with memory."""
        return len(self.references)

    @property
    def used(self) -> int:
        return len(self.references) - len(self._free)

    def begin(self, source: Sequence[int], shared: int, *, room: int) -> list[int] | None:
        """Return the pages of a new row of `room` tokens, the first `shared` of which are those of `source`.

        Whole pages are shared; a last part is copied to a page of the row's own. None: there is no room, and
        nothing has changed but for evicted prefixes.
        """
        whole, partly = divmod(shared, PAGE)
        # Held before others are taken: to make room, the source itself may be evicted.
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
        """Give a row pages for `tokens` tokens in all; return False, and change nothing, without room."""
        missing = pages_for(tokens) - len(pages)
        own = self._take(missing) if missing > 0 else []
        if own is None:
            return False
        pages.extend(own)
        return True

    def refer(self, pages: Iterable[int]) -> None:
        """Count one more owner of each page."""
        for page in pages:
            self.references[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Count one owner less of each page; pages without an owner are free."""
        for page in pages:
            assert self.references[page] > 0, f"page {page} has no owner"
            self.references[page] -= 1
            if not self.references[page]:
                heappush(self._free, page)

    def clear(self) -> None:
        """Forget all slabs, because their memory is given back. Nothing may refer to a page."""
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


def victim(arrivals: Sequence[int]) -> int | None:
    """The row to preempt: the youngest, so that the oldest always ends; None: one row alone has all pages."""
    if len(arrivals) < 2:
        return None
    return max(range(len(arrivals)), key=lambda row: arrivals[row])
