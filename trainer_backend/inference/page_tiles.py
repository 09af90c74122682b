"""Group running rows that begin with the same pages into tiles; a step reads shared pages once per tile.

Rows share whole pages of a known prefix (`pages`), and continue in their own pages. So the page numbers show
the shared part, which changes only with the running rows. Each row is in one group at most: if all rows share
a system message and some rows share more, the grouping that saves most reads is chosen.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.prefixes import shared_length

# The fewest rows and pages for which a separate shared part pays for joining it.
LEAST_ROWS, LEAST_PAGES = 4, 2


class Tiles(NamedTuple):
    """Tensors on the device with room for the most tiles of a step, so that a CUDA graph can use them."""

    rows_NM: Tensor
    """int32, the rows of each tile; -1 after its last row and in unused tiles."""
    shared_B: Tensor
    """int32, the number of tokens that a row shares with its tile, in whole pages; 0 for a row in no tile."""


class Group(NamedTuple):
    """Rows in ascending order and the number of pages with which all of them begin."""

    rows: list[int]
    pages: int


def most_tiles(rows: int) -> int:
    """Return the most tiles of a step: groups of LEAST_ROWS rows or more fill at most rows / 2 tiles."""
    return max(1, rows // 2)


def group_rows(pages_B: Sequence[list[int]], *, tile_rows: int) -> list[Group]:
    """Return the disjoint groups of rows that save the most reads in tiles of `tile_rows` rows.

    `pages_B` are the full pages of each row. A group has at least LEAST_ROWS rows.
    """
    if tile_rows < LEAST_ROWS:
        return []
    order = sorted(range(len(pages_B)), key=lambda row: pages_B[row])
    return _choose_groups(order, pages_B, tile_rows)


def _choose_groups(rows: list[int], pages_B: Sequence[list[int]], tile_rows: int) -> list[Group]:
    """Group rows that are sorted by pages: all in one group, or parts that share more, and the rest."""
    if len(rows) < LEAST_ROWS:
        return []
    depth = shared_length(pages_B[rows[0]], pages_B[rows[-1]])  # sorted rows in between share these too
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
    """Count the page reads that groups save: a tile reads each page once."""
    return sum((len(group.rows) - -(-len(group.rows) // tile_rows)) * group.pages for group in groups)


def fill_tiles(
    groups: Sequence[Group], rows_NM: NDArray[np.int32], shared_B: NDArray[np.int32], *, page: int
) -> None:
    """Write groups into the tensors of `Tiles`; `page` is the number of tokens of a page."""
    rows_NM[:], shared_B[:] = -1, 0
    tile, width = 0, rows_NM.shape[1]
    for group in groups:
        shared_B[group.rows] = group.pages * page
        for at in range(0, len(group.rows), width):
            rows = group.rows[at : at + width]
            rows_NM[tile, : len(rows)] = rows
            tile += 1
