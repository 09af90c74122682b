"""The cache's index of prefixes: the longest part of a prompt with keys and values in some row or copy.

Rows of running requests and copies of finished ones can be reused: a conversation continues its last turn,
siblings share their prompt, and all prompts of a job share the system message. The least recently used copy
is dropped first. A search costs O(prompt): blocks of ids are hashed in a chain, and the ids behind equal
hashes are always compared.

A cache with states cannot be cut: a prompt continues only from all that a row or a copy holds. So where a
prompt parts from a known one, a state is kept there, a mark, from which the next such prompt continues.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_backend.inference.cache import RowCache
from trainer_backend.inference.trunks import BLOCK
from trainer_backend.models.folder import is_out_of_memory

# Shorter prefixes are not used: rests of prompts attend under a mask in calls of their own, and for a small
# model these cost as much as so many tokens do. A multiple of BLOCK.
SHORTEST_PREFIX = 3 * BLOCK


class Prefix:
    """Ids and the place of their keys and values: a row of the cache, a copy that it made of one, or None.

    `experts` are those of its tokens and perhaps of more, [n, W] each, where they are recorded.
    """

    __slots__ = ("block_keys", "experts", "ids", "place")

    def __init__(self, ids: Sequence[int], experts: Sequence[NDArray[np.uint16]] = ()) -> None:
        self.ids, self.experts = list(ids), experts
        self.block_keys = list(block_keys(self.ids)) if len(self.ids) >= SHORTEST_PREFIX else []
        self.place: Any = None


def block_keys(ids: Sequence[int]) -> Iterator[int]:
    """Yield one key per whole block, which depends on all ids up to its end."""
    key = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key


class PrefixIndex:
    """Finds the longest cached prefix: exact to the block, and to the token among the last of a block."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[Prefix, None]] = {}

    def add(self, prefix: Prefix) -> None:
        for key in prefix.block_keys:
            self._holders.setdefault(key, {})[prefix] = None

    def remove(self, prefix: Prefix) -> None:
        for key in prefix.block_keys:
            holders = self._holders.get(key, {})
            holders.pop(prefix, None)
            if not holders:
                self._holders.pop(key, None)

    def longest(self, target: Prefix) -> "Match":
        """Return a prefix and how many ids it shares with the front of `target`, at least SHORTEST_PREFIX."""
        for blocks in range(len(target.block_keys), 0, -1):
            holders = self._holders.get(target.block_keys[blocks - 1])
            if holders:
                prefix = next(reversed(holders))
                length = shared_length(prefix.ids, target.ids, at_least=blocks * BLOCK)
                return Match(prefix, length) if length >= SHORTEST_PREFIX else NOTHING
        return NOTHING

    def longest_whole(self, target: Prefix, holds: Callable[[Any, int], bool]) -> "Match":
        """Return the longest prefix all of whose ids begin `target`, and whose place holds just these."""
        for blocks in range(len(target.block_keys), 0, -1):
            holders = self._holders.get(target.block_keys[blocks - 1], {})
            whole = [
                prefix
                for prefix in holders
                if len(prefix.block_keys) == blocks
                and prefix.ids == target.ids[: len(prefix.ids)]
                and holds(prefix.place, len(prefix.ids))
            ]
            if whole:
                prefix = max(whole, key=lambda prefix: len(prefix.ids))
                return Match(prefix, len(prefix.ids))
        return NOTHING


class Match(NamedTuple):
    """A cached prefix, and the number of its ids that are shared."""

    prefix: Prefix | None
    length: int
    lost: int = 0
    """Ids more that are known, but of which no state was kept."""
    mark: int = 0
    """Where to keep a state on the way, for the next one that shares them; 0: nowhere."""


NOTHING = Match(None, 0)


def shared_length(one: Sequence[int], other: Sequence[int], *, at_least: int) -> int:
    """Count the ids that two lists share from the start; return 0 if it is fewer than `at_least`."""
    if one[:at_least] != other[:at_least]:
        return 0
    rest = zip(islice(one, at_least, None), islice(other, at_least, None), strict=False)
    return at_least + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))


def mark_at(known: Match, target: Prefix) -> int:
    """Return where a prompt that shares `known` ids should leave a state for the next one.

    Where both go on, prompts part at other tokens each time (an observation's first word is the same now and
    then): the end of the last block before serves them all.
    """
    assert known.prefix is not None
    if known.length in (len(known.prefix.ids), len(target.ids)):
        return known.length
    return known.length // BLOCK * BLOCK


class Prefixes:
    """The index of running rows and copies, and the limit on copies.

    A copy of n tokens takes n / max_model_len of a full row, so `most` copies take at most as much memory as
    `most` more slots; marks are as many again, in caches that need them. With `most` 0 nothing is reused, not
    even running rows. Belongs to the engine thread.
    """

    def __init__(self, cache: RowCache, *, most: int) -> None:
        self._cache = cache
        cache.on_shortage(self.drop_oldest)
        self._most = most
        self._index = PrefixIndex()
        self.copies: dict[Prefix, None] = {}  # least recently used first
        self._marks: set[Prefix] = set()  # of them, those kept inside a prompt

    @property
    def enabled(self) -> bool:
        return self._most > 0

    @property
    def cuts(self) -> bool:
        """Whether any part of a known prefix can be gone on from."""
        return self._cache.cuts

    def find(self, target: Prefix) -> Match:
        """Find the cached prefix that shares the most first tokens."""
        known = self._index.longest(target)
        if self.cuts or known.prefix is None:
            return known
        whole = self._index.longest_whole(target, self._cache.holds)
        mark = mark_at(known, target)
        lost = max(0, known.length - whole.length)  # `known` is exact to the block
        return whole._replace(lost=lost, mark=mark if mark > whole.length else 0)

    def mark(self, prefix: Prefix, row: int) -> None:
        """Keep the state of a row after these ids, all that it has."""
        if self.enabled and len(prefix.ids) >= SHORTEST_PREFIX:
            self._keep(prefix, row, is_mark=True)

    def fill(self, match: Match, row: int, *, room: int) -> int:
        """Open a row for `room` tokens, with a matching prefix; return the prefix's number of tokens."""
        place = None if match.prefix is None else match.prefix.place
        if match.prefix is None or place is None:  # it may have made room for a row that was opened before
            self._cache.open_row(row, room=room)
            return 0
        ids = match.prefix.ids[: match.length]
        if isinstance(place, int):
            self._cache.share_row(place, row, ids, room=room)
        else:
            self._touch(match.prefix)
            self._cache.copy_in(place, row, ids, room=room)
        return match.length

    def runs(self, prefix: Prefix, row: int) -> None:
        """Record that a row now has the keys and values of these ids."""
        if self.enabled:
            prefix.place = row
            self._index.add(prefix)

    def move(self, prefix: Prefix, row: int) -> None:
        """Record that the keys and values are in another row now."""
        if prefix.place is not None:
            prefix.place = row

    def ends(self, prefix: Prefix, row: int, ids: Sequence[int]) -> None:
        """Record the end of a row, and keep a copy of its `ids` (the prefix and sampled ones)."""
        is_shared = prefix.place is not None
        self.unshare(prefix)
        if is_shared and len(ids) >= SHORTEST_PREFIX:
            self._keep(Prefix(ids, prefix.experts), row, is_mark=False)

    def unshare(self, prefix: Prefix) -> None:
        """Stop sharing a running row's keys and values."""
        if prefix.place is not None:
            self._index.remove(prefix)
            prefix.place = None

    def drop_oldest(self) -> bool:
        """Drop the least recently used copy; return False if there is none."""
        if self.copies:
            self._drop(next(iter(self.copies)))
            return True
        return False

    def drop_copies(self) -> None:
        """Free the memory of all copies."""
        while self.drop_oldest():
            pass

    def forget(self, prefixes: Iterable[Prefix]) -> None:
        """Forget everything computed so far: no row seeds a later request or is copied at its end."""
        self.drop_copies()
        for prefix in prefixes:
            self.unshare(prefix)

    def _keep(self, new: Prefix, row: int, *, is_mark: bool) -> None:
        base, length, *_ = self.find(new)
        if base is not None and base in self.copies:
            if length == len(new.ids):
                self._touch(base)
                return
            if length == len(base.ids) and not is_mark and base not in self._marks:
                self._drop(base)  # the new one contains it
        alike = [copy for copy in self.copies if (copy in self._marks) == is_mark]
        if len(alike) >= self._most:
            self._drop(alike[0])
        try:
            new.place = self._cache.copy_out(row, len(new.ids))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.drop_copies()
            return
        self.copies[new] = None
        if is_mark:
            self._marks.add(new)
        self._index.add(new)

    def _touch(self, prefix: Prefix) -> None:
        del self.copies[prefix]
        self.copies[prefix] = None

    def _drop(self, prefix: Prefix) -> None:
        del self.copies[prefix]
        self._marks.discard(prefix)
        self._index.remove(prefix)
        self._cache.drop_copy(prefix.place)
        prefix.place = None
