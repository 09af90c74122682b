"""Packs segments into rows of a batch, so that a prefix that several segments of a row share is stored once.

A *trie* (prefix tree) is a set of segments that begin with the same tokens. A *row* is one packed sequence.
"""

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

# A part of a cut trie may end early, to repeat fewer tokens, if it fills at least this share of a row.
_NEARLY = 7 / 8


@dataclass(slots=True)
class Beginnings:
    """The segments of one row, in order, and the lengths of the prefixes that they share."""

    members: list[int]
    shared: list[int] = field(default_factory=list)
    """Length of the prefix that each member shares with the member before it. Empty: none share tokens."""


@dataclass(frozen=True, slots=True)
class Tries:
    """Segments sorted by their tokens, so that segments with a common prefix are adjacent.

    Arrays of length S have one item per segment, in sorted order.
    """

    order_S: Sequence[int]
    """Index of each segment in the list from which `of` built this object."""
    length_S: Numbers
    """Number of tokens of each segment."""
    sampled_S: Numbers
    """Number of sampled tokens of each segment."""
    shared_S: Numbers
    """Length of the prefix that each segment shares with the segment before it; 0: a new trie begins."""

    @classmethod
    def of(cls, segments: Sequence[Segment], share_from: int) -> Tries:
        """Sort the segments into tries. Prefixes shorter than `share_from` tokens are not shared.

        Tokens that were sent to different experts are not shared either.
        """
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
        """Number of tokens of all segments, where a token that segments share is counted once."""
        return int((self.length_S - self.shared_S).sum())

    def rows(self, row_tokens: int) -> list[Beginnings]:
        """Pack the segments into rows of at most `row_tokens` tokens. Tries longer than a row are cut."""
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
        """Cut tries that are longer than a row into parts that fit into a row.

        Return the index of the first segment of each part, and the number of segments. A cut is placed where
        the part nearly fills a row and the segments at the cut share the fewest tokens, because the next part
        repeats those tokens. Siblings thus stay together, and hardly any rows are added.
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
    """Pack sequences of these lengths into rows of at most `row_tokens` tokens by best-fit decreasing.

    Return for each row the indices of its sequences, in the order in which they were placed. Raises
    BatchError for a sequence that is empty or longer than a row.

    Sequences are placed from the longest to the shortest, each in the fullest row that has room for it. The
    number of rows is at most 11/9 of the smallest possible number, plus a constant. Sequences of equal length
    are placed in the order given, so the result is deterministic.

    `sampled` contains the number of sampled tokens of each sequence; a row has at most `row_tokens` sampled
    tokens. A sequence that stands for several segments can have more sampled tokens than tokens, because a
    shared token counts once for each segment that sampled it.

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
    """Return the lengths of the shared prefixes of sorted sequences, without the trie's short branches.

    `alike` is the length of the prefix that each sequence has in common with the sequence before it. Each
    branch of a trie costs an attention call. A branch that is less than `least` ids deeper than its parent
    branch is therefore dropped: its sequences share only the ids up to the parent, and repeat the others.
    """
    above: list[int | None] = [None] * len(alike)  # parent: the deeper of the two nearest shallower branches
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
    """Return [L] numbers for each segment, which are equal for tokens that may be shared.

    Without experts, the numbers are the token ids. With experts, numbers are equal if both the ids and the
    experts are equal, because a shared token is computed once, with one choice of experts. Another version of
    the policy, or another batch in bfloat16, may choose other experts for the same text.
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
    """Return the length of each sequence's common prefix with the sequence before it; 0 for the first one."""
    shortest_S = np.array([0, *map(min, pairwise(map(len, rows)))])
    first_S = shortest_S.cumsum() - shortest_S
    ones, others = (
        np.concatenate(
            [rows[0][:0], *(row[:count] for row, count in zip(side, shortest_S[1:].tolist(), strict=True))]
        )
        for side in (rows[1:], rows[:-1])
    )
    # Indices at which a sequence differs from the one before it. The last entry is beyond all sequences.
    apart = np.append(np.flatnonzero(ones != others), len(ones))
    found_S = apart[np.searchsorted(apart, first_S)] - first_S
    alike: list[int] = np.minimum(found_S, shortest_S).tolist()
    return alike
