"""Find the longest part of a prompt whose keys and values are already in the cache.

Keys and values are reused from rows of running requests and from copies of finished requests: a conversation
continues its last turn, sibling rollouts share their prompt, and all prompts of a job share the system
message. The least recently used copy is dropped first. A search costs O(length of the prompt): ids are hashed
in blocks, each hash includes the hash of the block before, and if hashes are equal, the ids are compared too.

States of recurrent layers (`layer_cache`) cannot be cut, so with such layers a prompt can continue only from
the end of a row or copy. Therefore states are also kept at *marks*: positions at which an earlier prompt
departed from a known prompt.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from trainer_backend.inference.cache import RowCache
from trainer_backend.inference.trunks import BLOCK
from trainer_backend.models.folder import is_out_of_memory

# The shortest prefix that is reused, a multiple of BLOCK. After a reused prefix, the rest of the prompt needs
# separate calls with a mask, which cost a small model as much as computing this number of tokens.
SHORTEST_PREFIX = 3 * BLOCK


class Prefix:
    """Token ids, and the `place` of their keys and values: the number of a row, a copy of a row, or None.

    `experts` contains the experts of these tokens, and possibly of more tokens, in arrays [n tokens, W
    choices]. It is empty unless experts are recorded.
    """

    __slots__ = ("block_keys", "experts", "ids", "place")

    def __init__(self, ids: Sequence[int], experts: Sequence[NDArray[np.uint16]] = ()) -> None:
        self.ids, self.experts = list(ids), experts
        self.block_keys = list(block_keys(self.ids)) if len(self.ids) >= SHORTEST_PREFIX else []
        self.place: Any = None


def block_keys(ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash for each whole block of ids; it depends on all ids up to the end of the block."""
    key = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key


class PrefixIndex:
    """Index of cached prefixes. A search compares the hashes of whole blocks first, and then ids."""

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
        """Return the cached prefix that shares the largest number of whole blocks with `target`.

        Return NOTHING if the prefix shares fewer than SHORTEST_PREFIX ids with `target`.
        """
        for blocks in range(len(target.block_keys), 0, -1):
            holders = self._holders.get(target.block_keys[blocks - 1])
            if holders:
                prefix = next(reversed(holders))
                length = shared_length(prefix.ids, target.ids, at_least=blocks * BLOCK)
                return Match(prefix, length) if length >= SHORTEST_PREFIX else NOTHING
        return NOTHING

    def longest_whole(self, target: Prefix, holds: Callable[[Any, int], bool]) -> "Match":
        """Return the longest cached prefix whose ids are all at the start of `target`.

        Only prefixes for which `holds(place, number of ids)` is true are considered.
        """
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
    """A cached prefix, and the number of ids that a prompt shares with it."""

    prefix: Prefix | None
    length: int
    lost: int = 0
    """The number of ids after `length` that are cached, but cannot be reused because no state was kept
    there."""
    mark: int = 0
    """The length at which to keep a state for the next prompt that shares these ids; 0: keep no state."""


NOTHING = Match(None, 0)


def shared_length(one: Sequence[int], other: Sequence[int], *, at_least: int = 0) -> int:
    """Return how many ids two lists share from the start, or 0 if this is less than `at_least`."""
    if one[:at_least] != other[:at_least]:
        return 0
    rest = zip(islice(one, at_least, None), islice(other, at_least, None), strict=False)
    return at_least + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))


def mark_at(known: Match, target: Prefix) -> int:
    """Return the length at which to keep a state of `target` for the next prompt that shares these ids.

    `known` is the cached prefix that shares the most ids with `target`. If the shared ids are the whole
    prefix or the whole target, the result is their number. Otherwise, the result is the end of the last
    shared block, because later prompts may depart at slightly different tokens: for example, the first words
    of two observations may be equal.
    """
    assert known.prefix is not None
    if known.length in (len(known.prefix.ids), len(target.ids)):
        return known.length
    return known.length // BLOCK * BLOCK


class Prefixes:
    """The index of running rows and of kept copies; it limits the number of copies.

    At most `most` copies are kept, and each takes at most as much memory as a slot. A cache with states keeps
    up to `most` more copies at marks. If `most` is 0, nothing is reused, not even running rows. Only the
    engine thread uses this class.
    """

    def __init__(self, cache: RowCache, *, most: int) -> None:
        self._cache = cache
        cache.on_shortage(self.drop_oldest)
        self._most, self.enabled = most, most > 0
        self.cuts = cache.cuts  # whether a prompt can continue from any part of a known prefix
        self._index = PrefixIndex()
        self.copies: dict[Prefix, None] = {}  # least recently used first
        self._marks: set[Prefix] = set()  # the copies that were kept at marks

    def find(self, target: Prefix) -> Match:
        """Return the cached prefix from which the longest beginning of `target` can be reused."""
        known = self._index.longest(target)
        if self.cuts or known.prefix is None:
            return known
        whole = self._index.longest_whole(target, self._cache.holds)
        mark = mark_at(known, target)
        lost = max(0, known.length - whole.length)  # `known` may be the longest only in whole blocks
        return whole._replace(lost=lost, mark=mark if mark > whole.length else 0)

    def mark(self, prefix: Prefix, row: int) -> None:
        """Keep a copy of a row at a mark, when the row contains exactly the ids of `prefix`."""
        if self.enabled and len(prefix.ids) >= SHORTEST_PREFIX:
            self._keep(prefix, row, is_mark=True)

    def fill(self, match: Match, row: int, *, room: int) -> int:
        """Open a row that has room for `room` tokens and begins with the matching prefix.

        Return the number of reused tokens, which is 0 if the prefix has been evicted.
        """
        place = None if match.prefix is None else match.prefix.place
        if match.prefix is None or place is None:  # an earlier row may have evicted the prefix
            self._cache.open_row(row, room=room)
            return 0
        ids = match.prefix.ids[: match.length]
        if isinstance(place, int):
            self._cache.share_row(place, row, ids, room=room)
        else:
            self._touch(match.prefix)
            self._cache.copy_in(place, row, ids, room=room)
        return match.length

    def start_row(self, prefix: Prefix, row: int) -> None:
        """Let later prompts reuse a row, which now contains the keys and values of a prefix."""
        if self.enabled:
            prefix.place = row
            self._index.add(prefix)

    def move(self, prefix: Prefix, row: int) -> None:
        """Record that the keys and values of a prefix have moved to another row."""
        if prefix.place is not None:
            prefix.place = row

    def end_row(self, prefix: Prefix, row: int, ids: Sequence[int]) -> None:
        """Record that a row ends, and keep a copy of its `ids`: the ids of the prefix and the sampled ids."""
        is_shared = prefix.place is not None
        self.unshare(prefix)
        if is_shared and len(ids) >= SHORTEST_PREFIX:
            self._keep(Prefix(ids, prefix.experts), row, is_mark=False)

    def unshare(self, prefix: Prefix) -> None:
        """Prevent later prompts from reusing a running row."""
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
        while self.drop_oldest():
            pass

    def forget(self, prefixes: Iterable[Prefix]) -> None:
        """Drop all copies, and stop sharing the running rows of `prefixes`.

        These rows are then neither reused by a later request nor copied when they end.
        """
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
                self._drop(base)  # the new copy includes all tokens of `base`
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
