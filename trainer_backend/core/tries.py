"""Which segments share a row, and which of their first tokens stand there once."""

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

# A part of a trie that is cut fills its row up to this share at least.
_NEARLY = 7 / 8


@dataclass(slots=True)
class Beginnings:
    """The segments of a row in order, and how many first tokens of each it has of those before it."""

    members: list[int]
    shared: list[int] = field(default_factory=list)
    """None of any, where this is empty."""


@dataclass(frozen=True, slots=True)
class Tries:
    """Segments in an order in which those that begin alike meet: that of their ids, where none names experts.

    order_S: which segment; length_S, sampled_S: its tokens, and those of them that are sampled.
    shared_S: how many first tokens it has of the one before it; 0: a trie begins.
    """

    order_S: Sequence[int]
    length_S: Numbers
    sampled_S: Numbers
    shared_S: Numbers

    @classmethod
    def of(cls, segments: Sequence[Segment], share_from: int) -> Tries:
        """Of beginnings of at least `share_from` tokens, with equal experts where segments name some."""
        rows = _compared(segments)
        # Bytes in this order compare as the numbers do.
        keys = [row.astype(">u4").tobytes() for row in rows]
        order = sorted(range(len(segments)), key=keys.__getitem__)
        alike = _alike([rows[index] for index in order])
        return cls(
            order,
            np.array([len(segments[index]) for index in order]),
            np.array([len(segments[index].logprobs) for index in order]),
            np.array(_branches(alike, share_from)),
        )

    @property
    def distinct(self) -> int:
        """The tokens of one row of all: the least that has to be computed of them."""
        return int((self.length_S - self.shared_S).sum())

    def rows(self, row_tokens: int) -> list[Beginnings]:
        """Whole tries, or parts of those longer than a row, in rows that they fill best."""
        starts = self._parts(row_tokens)
        first_S = np.array(starts[:-1])
        own_S = self.length_S - self.shared_S
        own_S[first_S] = self.length_S[first_S]
        lengths, sampled = (np.add.reduceat(count_S, first_S).tolist() for count_S in (own_S, self.sampled_S))
        shared_S, rows = self.shared_S.tolist(), []
        for parts in pack(lengths, row_tokens, sampled):
            places = [place_ for part in sorted(parts) for place_ in range(starts[part], starts[part + 1])]
            # Parts of one trie that meet in a row share what lies between them.
            shared = [min(shared_S[a + 1 : b + 1]) for a, b in pairwise(places)]
            rows.append(Beginnings([self.order_S[place_] for place_ in places], [0, *shared]))
        return rows

    def _parts(self, row_tokens: int) -> list[int]:
        """Where parts that fit a row begin, then the end.

        A longer trie is cut where the least is computed twice, by a part that is nearly full: so siblings
        stay together, and there are hardly more rows.
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

    Each sequence, longest first, goes to the fullest row that still has room for it. The bound is that of
    first fit (11/9 of the fewest rows possible, and a constant); the row is found by bisection. Equal lengths
    keep their order, so the result is deterministic: for each row, the indices of its sequences in order of
    placement. Raises BatchError for a sequence that is empty or longer than a row.

    `sampled` tokens of a sequence may be more than its tokens where these are several segments'; a row has at
    most `row_tokens` of them too.

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


def _branches(alike: Sequence[int], least: int) -> list[int]:
    """How many first ids each of some sorted rows shares with the one before it, of all that it could.

    They branch after `alike` ids. A branch costs attention a call of its own, so one less than `least` ids
    behind the one above it is left out: what is below it begins at that one, and holds those ids once more.
    """
    above: list[int | None] = [None] * len(alike)  # the branch above each: the deepest that is less deep
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


def _compared(segments: Sequence[Segment]) -> list[NDArray[np.int32]]:
    """[L] of each segment: its ids, or numbers that are equal where ids and experts are.

    One place of a row goes to one choice of experts, and another version of the policy, or another batch in
    bfloat16, may have chosen others for the same text.
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


def _alike(rows: Sequence[NDArray[Any]]) -> list[int]:
    """How many first ids each row has in common with the one before it; 0 of the first."""
    shortest_S = np.array([0, *map(min, pairwise(map(len, rows)))])
    first_S = shortest_S.cumsum() - shortest_S
    ones, others = (
        np.concatenate(
            [rows[0][:0], *(row[:count] for row, count in zip(side, shortest_S[1:].tolist(), strict=True))]
        )
        for side in (rows[1:], rows[:-1])
    )
    # The first place of each row, from its own on, where they differ; behind all of them the next row's.
    apart = np.append(np.flatnonzero(ones != others), len(ones))
    found_S = apart[np.searchsorted(apart, first_S)] - first_S
    alike: list[int] = np.minimum(found_S, shortest_S).tolist()
    return alike
