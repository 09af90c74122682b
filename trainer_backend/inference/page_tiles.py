"""Tiles of running rows that begin with the same pages, which a decode step then reads once for a tile.

Rows share whole pages of a known prefix (`pages`), and continue in pages of their own: so which they share is
told by their numbers, and changes with the running rows alone. Shared pages are cut once: where all rows
share a system message and some of them more, the cut is the one that saves most reads.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

# Fewer rows, or pages, do not pay for a part that is to be joined.
LEAST_ROWS, LEAST_PAGES = 4, 2


class Tiles(NamedTuple):
    """On the device, of as many tiles as a step of its rows may have, so that a CUDA graph can hold it.

    rows_NM: int32, the rows of each tile, -1 behind its last one and in tiles that are not used.
    shared_B: int32, tokens that a row shares with those of its tile, whole pages; 0 for a row in no tile.
    """

    rows_NM: Tensor
    shared_B: Tensor


class Group(NamedTuple):
    """Rows in ascending order and the number of pages with which all of them begin."""

    rows: list[int]
    pages: int


def most_tiles(rows: int) -> int:
    """Return how many tiles a step may have: n rows, at least LEAST_ROWS, fill n / 2 tiles at most."""
    return max(1, rows // 2)


def group_rows(pages_B: Sequence[list[int]], *, tile_rows: int) -> list[Group]:
    """Return groups of rows, each row in one at most, that save most reads in tiles of so many rows.

    `pages_B` are the pages of each row that are full. Tiles of fewer than LEAST_ROWS rows make no group.
    """
    if tile_rows < LEAST_ROWS:
        return []
    order = sorted(range(len(pages_B)), key=lambda row: pages_B[row])
    return _best(order, pages_B, tile_rows)


def _best(rows: list[int], pages_B: Sequence[list[int]], tile_rows: int) -> list[Group]:
    """The groups of rows in order of their pages: all of them, or parts that share more and a rest."""
    if len(rows) < LEAST_ROWS:
        return []
    depth = _common(pages_B[rows[0]], pages_B[rows[-1]])  # what lies between them in order shares it too
    longer = (row for row in rows if len(pages_B[row]) > depth)
    apart = [
        group
        for _, part in groupby(longer, key=lambda row: pages_B[row][depth])
        for group in _best(list(part), pages_B, tile_rows)
    ]
    if depth < LEAST_PAGES:
        return apart
    rest = set(rows).difference(*(group.rows for group in apart))
    if len(rest) >= LEAST_ROWS:
        apart.append(Group(sorted(rest), depth))
    whole = [Group(sorted(rows), depth)]
    return max(whole, apart, key=lambda groups: _saved(groups, tile_rows))


def _saved(groups: Sequence[Group], tile_rows: int) -> int:
    """How many reads of a page groups save: a tile reads each once."""
    return sum((len(group.rows) - -(-len(group.rows) // tile_rows)) * group.pages for group in groups)


def _common(one: list[int], other: list[int]) -> int:
    """How many first pages two rows share."""
    for place, (page, wanted) in enumerate(zip(one, other, strict=False)):
        if page != wanted:
            return place
    return min(len(one), len(other))


def fill_tiles(
    groups: Sequence[Group], rows_NM: NDArray[np.int32], shared_B: NDArray[np.int32], *, page: int
) -> None:
    """Write groups, whose pages have so many tokens, as the tensors of `Tiles`."""
    rows_NM[:], shared_B[:] = -1, 0
    tile, width = 0, rows_NM.shape[1]
    for group in groups:
        shared_B[group.rows] = group.pages * page
        for at in range(0, len(group.rows), width):
            rows = group.rows[at : at + width]
            rows_NM[tile, : len(rows)] = rows
            tile += 1
