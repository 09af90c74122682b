"""Store the keys and values of running requests in pages. Requests that begin alike share pages."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from trainer_backend.inference.cache import RowCache
from trainer_backend.inference.page_memory import PageMemory
from trainer_backend.inference.pages import PAGE, PagePool, pages_for

Ints = NDArray[np.int64]


class PagedCache(RowCache):
    """A cache in which each row, and each copy of a row, is a list of pages.

    A new row that begins with cached tokens shares their full pages; only a partly filled last page is
    copied. If no page is free and no kept prefix is left to evict, a method raises `torch.OutOfMemoryError`.

    `limit` is the largest number of pages, and suffices for at least one row of `max_len` tokens. `tables`,
    [slots, pages of a row] int32, contains the page numbers of each row. `clear_row` does nothing, because
    data after the end of a row is never read.
    """

    def __init__(self, memory: PageMemory, *, slots: int, max_len: int, limit: int) -> None:
        self.slots, self.memory = slots, memory
        self._evict: Callable[[], bool] = lambda: False
        self.tables: NDArray[np.int32] = np.zeros((slots, pages_for(max_len)), dtype=np.int32)
        self._rows: list[list[int]] = [[] for _ in range(slots)]
        self.version = 0
        """A number that changes when the first pages of a row change. It does not change when a row grows."""
        self.pool = PagePool(limit, grow=memory.grow, evict=lambda: self._evict(), copy=memory.copy)

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        self._evict = evict

    def open_row(self, row: int, *, room: int) -> None:
        self._begin(row, [], 0, room)

    def move_row(self, source: int, target: int, length: int) -> None:
        """Change the number of a row from `source` to `target`; no open row may have the number `target`."""
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
        """Give each row enough pages for its number of tokens in `lengths`.

        If memory runs out, the rows that already got their pages keep them.
        """
        for row, length in zip(rows.tolist(), lengths.tolist(), strict=True):
            pages = self._rows[row]
            if len(pages) * PAGE < length:
                if not self.pool.extend(pages, length):
                    self._refuse(length)
                self._note(row)

    def full_pages(self, row: int, length: int) -> list[int]:
        """Return the pages that the first `length` tokens of a row fill. They are not written again."""
        return self._rows[row][: length // PAGE]

    def release(self) -> None:
        """Give all memory back to the device. Every row must be closed, and every copy dropped."""
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
    """Return the slot of each token: page * PAGE + position in the page.

    `rows` and `positions` contain the row of each token in `tables_BP`, and its position in that row.
    """
    pages: Ints = tables_BP[rows, positions // PAGE].astype(np.int64)
    return pages * PAGE + positions % PAGE
