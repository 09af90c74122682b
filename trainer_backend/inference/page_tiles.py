"""Group rows that begin with the same pages into tiles; a decode step reads shared pages once per tile.

A tile is a set of rows whose queries one program of the kernel computes together. Rows that begin with the
same known prefix share the full pages of this prefix (`pages`), and continue in pages of their own. Shared
pages are recognised by equal page numbers, and change only when the running rows change. Each row is in at
most one group. If all rows share a system message and some rows share more, the grouping that saves the most
reads is chosen.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.prefixes import shared_length

# The smallest numbers of rows and of shared pages for which one read saves more than joining the parts costs.
LEAST_ROWS, LEAST_PAGES = 4, 2


class Tiles(NamedTuple):
    """The tiles of one step, as device tensors of a fixed size, so that a CUDA graph can use them."""

    rows_NM: Tensor
    """int32, the rows of each tile; entries without a row, and unused tiles, contain -1."""
    shared_B: Tensor
    """int32, the number of tokens in the pages that each row shares with its tile; 0 without a tile."""


class Group(NamedTuple):
    """A set of rows, in ascending order, and how many pages all of them share at the start."""

    rows: list[int]
    pages: int


def most_tiles(rows: int) -> int:
    """Return an upper bound on the number of tiles of a step with `rows` rows."""
    # A group has at least LEAST_ROWS rows, so it needs at most half as many tiles as rows.
    return max(1, rows // 2)


def group_rows(pages_B: Sequence[list[int]], *, tile_rows: int) -> list[Group]:
    """Return the disjoint groups of rows that save the most page reads.

    `pages_B` lists the full pages of each row. A group has at least LEAST_ROWS rows, and is later divided
    into tiles of at most `tile_rows` rows.
    """
    if tile_rows < LEAST_ROWS:
        return []
    order = sorted(range(len(pages_B)), key=lambda row: pages_B[row])
    return _choose_groups(order, pages_B, tile_rows)


def _choose_groups(rows: list[int], pages_B: Sequence[list[int]], tile_rows: int) -> list[Group]:
    """Return groups of `rows`, which the caller has sorted by their pages.

    Either all rows form one group, or rows that share further pages form groups of their own, and the
    remaining rows form another group.
    """
    if len(rows) < LEAST_ROWS:
        return []
    depth = shared_length(pages_B[rows[0]], pages_B[rows[-1]])  # sorted: rows between share these too
    longer = (row for row in rows if len(pages_B[row]) > depth)
    apart = [
        group
        for _, part in groupby(longer, key=lambda row: pages_B[row][depth])
        for group in _choose_groups(list(part), pages_B, tile_rows)
    ]
    if depth < LEAST_PAGES:
        return apart
    rest = set(rows).difference(*(group.rows for group in apart))
    if len(rest) >= LEAST_ROWS:
        apart.append(Group(sorted(rest), depth))
    whole = [Group(sorted(rows), depth)]
    return max(whole, apart, key=lambda groups: _count_saved(groups, tile_rows))


def _count_saved(groups: Sequence[Group], tile_rows: int) -> int:
    """Return how many page reads the groups save, if each tile reads each shared page once."""
    return sum((len(group.rows) - -(-len(group.rows) // tile_rows)) * group.pages for group in groups)


def fill_tiles(
    groups: Sequence[Group], rows_NM: NDArray[np.int32], shared_B: NDArray[np.int32], *, page: int
) -> None:
    """Write groups into arrays with the layout of `Tiles`. A page has `page` tokens."""
    rows_NM[:], shared_B[:] = -1, 0
    tile, width = 0, rows_NM.shape[1]
    for group in groups:
        shared_B[group.rows] = group.pages * page
        for at in range(0, len(group.rows), width):
            rows = group.rows[at : at + width]
            rows_NM[tile, : len(rows)] = rows
            tile += 1
