"""Chooses which segments share a row, and which prefixes a row stores once."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer_backend.core.segments import Segment, experts_by_token
from trainer_backend.errors import BatchError

Numbers = NDArray[np.int64]

# The least share of a row that a part of a cut trie fills.
_NEARLY = 7 / 8


@dataclass(slots=True)
class Beginnings:
    """The segments of a row in order, and how many first tokens each shares with earlier ones."""

    members: list[int]
    shared: list[int] = field(default_factory=list)
    """Empty: no token is shared."""


@dataclass(frozen=True, slots=True)
class Tries:
    """Segments sorted by their tokens, so that those with a common prefix are adjacent."""

    order_S: Sequence[int]
    """Index of each segment in the order given."""
    length_S: Numbers
    """Number of tokens."""
    sampled_S: Numbers
    """Number of sampled tokens."""
    shared_S: Numbers
    """Number of first tokens shared with the segment before; 0: a trie begins."""

    @classmethod
    def of(cls, segments: Sequence[Segment], share_from: int) -> Tries:
        """Build the tries; prefixes below `share_from` tokens, or with different experts, are not shared."""
        rows = _number_tokens(segments)
        # Big-endian bytes sort like the numbers.
        keys = [row.astype(">u4").tobytes() for row in rows]
        order = sorted(range(len(segments)), key=keys.__getitem__)
        common = _count_common([rows[index] for index in order])
        return cls(
            order,
            np.array([len(segments[index]) for index in order]),
            np.array([len(segments[index].logprobs) for index in order]),
            np.array(_drop_short_branches(common, share_from)),
        )

    @property
    def distinct(self) -> int:
        """Number of tokens if each shared token counts once."""
        return int((self.length_S - self.shared_S).sum())

    def rows(self, row_tokens: int) -> list[Beginnings]:
        """Pack whole tries, or parts of those longer than a row, into rows."""
        starts = self._parts(row_tokens)
        first_S = np.array(starts[:-1])
        own_S = self.length_S - self.shared_S
        own_S[first_S] = self.length_S[first_S]
        lengths, sampled = (np.add.reduceat(count_S, first_S).tolist() for count_S in (own_S, self.sampled_S))
        shared_S, rows = self.shared_S.tolist(), []
        for parts in pack(lengths, row_tokens, sampled):
            places = [place_ for part in sorted(parts) for place_ in range(starts[part], starts[part + 1])]
            # Parts of one trie in the same row share their common prefix.
            shared = [min(shared_S[a + 1 : b + 1]) for a, b in pairwise(places)]
            rows.append(Beginnings([self.order_S[place_] for place_ in places], [0, *shared]))
        return rows

    def _parts(self, row_tokens: int) -> list[int]:
        """Cut tries into parts that fit a row; return the parts' starts and the end.

        A longer trie is cut so that parts nearly fill a row and few tokens are repeated. This keeps siblings
        together and adds hardly any rows.
        """
        shared_S, nearly = self.shared_S.tolist(), row_tokens * _NEARLY
        own_S, sampled_S = (
            [0, *count_S.cumsum().tolist()] for count_S in (self.length_S - self.shared_S, self.sampled_S)
        )
        starts, end = [0], 1
        while end < len(shared_S):
            first = starts[-1]
            before = own_S[first] - shared_S[first]
            is_full = (
                own_S[end + 1] - before > row_tokens or sampled_S[end + 1] - sampled_S[first] > row_tokens
            )
            if shared_S[end] and is_full:
                cuts = [end]
                while cuts[-1] > first + 1 and own_S[cuts[-1] - 1] - before >= nearly:
                    cuts.append(cuts[-1] - 1)
                end = min(cuts, key=shared_S.__getitem__)
            if is_full or not shared_S[end]:
                starts.append(end)
            end += 1
        return [*starts, len(shared_S)]


def pack(lengths: Sequence[int], row_tokens: int, sampled: Sequence[int] = ()) -> list[list[int]]:
    """Pack sequences of these lengths into rows of at most `row_tokens` tokens: best-fit decreasing.

    Each sequence, longest first, goes to the fullest row with room for it, found by bisection. The bound is
    that of first fit (11/9 of the fewest rows possible, and a constant). Equal lengths keep their order, so
    the result is deterministic. Returns for each row the indices of its sequences in order of placement.
    Raises BatchError for a sequence that is empty or longer than a row.

    `sampled` are the sequences' numbers of sampled tokens; a row also has at most `row_tokens` of these. A
    sequence has more sampled tokens than tokens if several segments share them.

    Source: Johnson et al., Worst-case performance bounds for simple one-dimensional packing algorithms, 1974.
    """
    sampled = sampled or [0] * len(lengths)
    rows: list[list[int]] = []
    sampled_B: list[int] = []
    room: list[tuple[int, int]] = []  # (tokens free, row), sorted
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        if not 1 <= length <= row_tokens:
            raise BatchError(f"sequence {index} has {length} tokens; a row takes 1 to {row_tokens}")
        most = row_tokens - sampled[index]
        fullest = bisect_left(room, (length, 0))
        while fullest < len(room) and sampled_B[room[fullest][1]] > most:
            fullest += 1
        if fullest < len(room):
            free, row = room.pop(fullest)
        else:
            free, row = row_tokens, len(rows)
            rows.append([])
            sampled_B.append(0)
        rows[row].append(index)
        sampled_B[row] += sampled[index]
        insort(room, (free - length, row))
    return rows


def _drop_short_branches(alike: Sequence[int], least: int) -> list[int]:
    """Return how many first ids each sorted row shares with the row before it; at most `alike`.

    Each branch of a trie costs an attention call. So a branch less than `least` ids below its parent branch
    is dropped: its rows branch at the parent, and repeat those ids.
    """
    above: list[int | None] = [None] * len(alike)  # the parent branch: the deepest shallower neighbour
    for places in (range(len(alike)), range(len(alike) - 1, -1, -1)):
        path: list[int] = []
        for here in places:
            while path and alike[path[-1]] >= alike[here]:
                path.pop()
            other = above[here]
            if path and (other is None or alike[path[-1]] > alike[other]):
                above[here] = path[-1]
            path.append(here)
    kept = [0] * len(alike)
    for here in sorted(range(len(alike)), key=alike.__getitem__):
        branch = above[here]
        last = 0 if branch is None else kept[branch]
        kept[here] = alike[here] if alike[here] - last >= least else last
    return kept


def _number_tokens(segments: Sequence[Segment]) -> list[NDArray[np.int32]]:
    """Return the [L] ids of each segment; with experts, numbers that are equal if both ids and experts are.

    A cell has one choice of experts. Another version of the policy, or another batch in bfloat16, may choose
    other experts for the same text.
    """
    experts = experts_by_token(segments)
    if experts is None:
        return [segment.token_ids for segment in segments]
    numbers: dict[bytes, int] = {}
    rows = []
    for segment, experts_LW in zip(segments, experts, strict=True):
        ids_L1 = segment.token_ids[:, None]
        token = ids_L1.itemsize + experts_LW.itemsize * experts_LW.shape[1]
        data = np.hstack(
            [np.ascontiguousarray(part).view(np.uint8) for part in (ids_L1, experts_LW)]
        ).tobytes()
        tokens = (data[first : first + token] for first in range(0, len(data), token))
        rows.append(np.array([numbers.setdefault(one, len(numbers)) for one in tokens], np.int32))
    return rows


def _count_common(rows: Sequence[NDArray[Any]]) -> list[int]:
    """Return how many first ids each row has in common with the row before it; 0 for the first row."""
    shortest_S = np.array([0, *map(min, pairwise(map(len, rows)))])
    first_S = shortest_S.cumsum() - shortest_S
    ones, others = (
        np.concatenate(
            [rows[0][:0], *(row[:count] for row, count in zip(side, shortest_S[1:].tolist(), strict=True))]
        )
        for side in (rows[1:], rows[:-1])
    )
    # The first difference of each row; beyond its end if there is none.
    apart = np.append(np.flatnonzero(ones != others), len(ones))
    found_S = apart[np.searchsorted(apart, first_S)] - first_S
    alike: list[int] = np.minimum(found_S, shortest_S).tolist()
    return alike
