"""Cache running requests in pages: rows by number, prefixes shared by reference."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_backend.inference.cache import RowCache
from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.pages import PAGE, PagePool, pages_for

Ints = NDArray[np.int64]


class PagedCache(RowCache):
    """A cache in pages, which copies only the last page of a shared prefix. A copy is a list of pages.

    If no page is free and every kept prefix is evicted, a method raises `torch.OutOfMemoryError`. `limit` is
    the largest number of pages, at least those of one row of `max_len`. `tables`, [slots, pages of a row]
    int32, has each row's page numbers. Data after a row's length is never read: `clear_row` does nothing.
    """

    def __init__(self, memory: PageMemory, *, slots: int, max_len: int, limit: int) -> None:
        self.slots, self.memory = slots, memory
        self._evict: Callable[[], bool] = lambda: False
        self.tables: NDArray[np.int32] = np.zeros((slots, pages_for(max_len)), dtype=np.int32)
        self._rows: list[list[int]] = [[] for _ in range(slots)]
        self.version = 0
        """A number that changes when the first pages of rows change, but not when rows grow."""
        self.pool = PagePool(limit, grow=memory.grow, evict=lambda: self._evict(), copy=memory.copy)

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        self._evict = evict

    def open_row(self, row: int, *, room: int) -> None:
        self._begin(row, [], 0, room)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Give the row `source` the number `target`, which no row has."""
        self.version += 1
        self._rows[target], self._rows[source] = self._rows[source], []
        self._note(target)

    def share_row(self, source: int, target: int, ids: Sequence[int], *, room: int) -> None:
        self._begin(target, self._rows[source], len(ids), room)

    def copy_out(self, row: int, length: int) -> list[int]:
        pages = self._rows[row][: pages_for(length)]
        self.pool.refer(pages)
        return pages

    def copy_in(self, copy: list[int], target: int, ids: Sequence[int], *, room: int) -> None:
        self._begin(target, copy, len(ids), room)

    def drop_copy(self, copy: list[int]) -> None:
        self.pool.drop(copy)
        copy.clear()

    def close_row(self, row: int) -> None:
        self.pool.drop(self._rows[row])
        self._rows[row] = []
        self.version += 1

    def extend(self, rows: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        """Give rows pages for `lengths` tokens. If memory runs out, some rows may have their pages."""
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            pages = self._rows[row]
            if len(pages) * PAGE < length:
                if not self.pool.extend(pages, length):
                    self._refuse(length)
                self._note(row)

    def full_pages(self, row: int, length: int) -> list[int]:
        """Return the pages of a row that `length` tokens fill, which are not written again."""
        return self._rows[row][: length // PAGE]

    def release(self) -> None:
        """Give all memory back to the device. No row may be open and no copy kept."""
        self.pool.clear()
        self.memory.release()

    def _begin(self, row: int, source: Sequence[int], shared: int, room: int) -> None:
        assert not self._rows[row], f"row {row} is open"
        pages = self.pool.begin(source, shared, room=room)
        if pages is None:
            self._refuse(room)
        else:
            self._rows[row] = pages
            self.version += 1
            self._note(row)

    def _note(self, row: int) -> None:
        pages = self._rows[row]
        self.tables[row, : len(pages)] = pages

    def _refuse(self, tokens: int) -> None:
        raise torch.OutOfMemoryError(
            f"out of memory: no pages for {tokens} tokens, {self.pool.used} of {self.pool.limit} are in use"
        )


def find_slots(tables_BP: NDArray[np.int32], rows: Ints | int, positions: Ints) -> Ints:
    """Return the slot, page * PAGE + position in the page, of the token at each position of each row."""
    pages: Ints = tables_BP[rows, positions // PAGE].astype(np.int64)
    return pages * PAGE + positions % PAGE
