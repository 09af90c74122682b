"""What the cache already knows of a prompt: the longest prefix that some row has keys and values of.

A row of a running request can be copied, and so can what is kept of ended ones: a conversation goes on from
its last turn, siblings share their prompt, and all prompts of a job its system message. What is kept is least
recently used out. Finding costs O(prompt): blocks of ids, hashed in a chain; equal hashes are never trusted,
the ids themselves are compared.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, takewhile
from typing import NamedTuple

from trainer_backend.inference.cache import RowCopy, SlotCache
from trainer_backend.models.folder import is_out_of_memory

BLOCK = 32
# Below it nothing is looked for or kept: prompts of two kinds need two forward calls, and the second costs a
# small model as much as these tokens do. A multiple of BLOCK.
SHORTEST_PREFIX = 3 * BLOCK


class Held:
    """Ids and where their keys and values are: a row of the cache, a copy of one, or nowhere (None)."""

    __slots__ = ("block_keys", "ids", "place")

    def __init__(self, ids: Sequence[int]) -> None:
        self.ids = list(ids)
        self.block_keys = list(block_keys(self.ids)) if len(self.ids) >= SHORTEST_PREFIX else []
        self.place: int | RowCopy | None = None


def block_keys(ids: Sequence[int]) -> Iterator[int]:
    """One key for each whole block, which depends on all ids up to its end."""
    key = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        key = hash((key, *ids[end - BLOCK : end]))
        yield key


class PrefixIndex:
    """Finds who holds the longest prefix: exact to the block, and to the token among the last of a block."""

    def __init__(self) -> None:
        self._holders: dict[int, dict[Held, None]] = {}

    def add(self, held: Held) -> None:
        for key in held.block_keys:
            self._holders.setdefault(key, {})[held] = None

    def remove(self, held: Held) -> None:
        for key in held.block_keys:
            holders = self._holders.get(key, {})
            holders.pop(held, None)
            if not holders:
                self._holders.pop(key, None)

    def longest(self, wanted: Held) -> "Found":
        """A holder and how many ids it shares with the front of `wanted`; NOTHING below SHORTEST_PREFIX."""
        for blocks in range(len(wanted.block_keys), 0, -1):
            holders = self._holders.get(wanted.block_keys[blocks - 1])
            if holders:
                held = next(reversed(holders))
                length = shared_length(held.ids, wanted.ids, at_least=blocks * BLOCK)
                return Found(held, length) if length >= SHORTEST_PREFIX else NOTHING
        return NOTHING


class Found(NamedTuple):
    """Who holds a prefix, and how many of its ids are shared."""

    held: Held | None
    length: int


NOTHING = Found(None, 0)


def shared_length(one: Sequence[int], other: Sequence[int], *, at_least: int) -> int:
    """How many ids two lists share from the start; 0 when it is fewer than `at_least`."""
    if one[:at_least] != other[:at_least]:
        return 0
    rest = zip(islice(one, at_least, None), islice(other, at_least, None), strict=False)
    return at_least + sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], rest))


class Prefixes:
    """The index over running rows and kept copies, and the bound on the copies.

    A kept prefix of n tokens takes n / max_model_len of what a row of the full cache takes, so `most` of them
    take at most as much as `most` more slots would. With `most` 0 nothing is looked for, also not among
    running rows. Belongs to the engine thread.
    """

    def __init__(self, cache: SlotCache, *, most: int) -> None:
        self._cache = cache
        self._most = most
        self._index = PrefixIndex()
        self._kept: dict[Held, None] = {}  # least recently used first

    @property
    def enabled(self) -> bool:
        return self._most > 0

    @property
    def kept(self) -> int:
        """How many copies there are."""
        return len(self._kept)

    def find(self, wanted: Held) -> Found:
        """Who has most of the first tokens."""
        return self._index.longest(wanted)

    def fill(self, found: Found, row: int) -> int:
        """Copy a found prefix into a row; return its number of tokens."""
        if found.held is None:
            return 0
        place = found.held.place
        if isinstance(place, RowCopy):
            self._cache.copy_in(place, row, found.length)
            self._used(found.held)
        else:
            assert place is not None, "what is nowhere is not in the index"
            self._cache.move_row(place, row, found.length)
        return found.length

    def runs(self, held: Held, row: int) -> None:
        """A row now has the keys and values of these ids."""
        if self.enabled:
            held.place = row
            self._index.add(held)

    def moved(self, held: Held, row: int) -> None:
        """The same keys and values, in another row."""
        if held.place is not None:
            held.place = row

    def ends(self, held: Held, row: int, ids: Sequence[int]) -> None:
        """A row is given up: keep its `ids` (those of `held` and what was sampled) for later prompts."""
        shared = held.place is not None
        self.unshare(held)
        if shared and len(ids) >= SHORTEST_PREFIX:
            self._keep(Held(ids), row)

    def unshare(self, held: Held) -> None:
        """A running row's keys and values are for itself alone from now on."""
        if held.place is not None:
            self._index.remove(held)
            held.place = None

    def drop_kept(self) -> None:
        """Free the memory of all copies."""
        for held in list(self._kept):
            self._drop(held)

    def forget(self, running: Iterable[Held]) -> None:
        """Nothing that was computed until now seeds a later request, or is kept after its end."""
        self.drop_kept()
        for held in running:
            self.unshare(held)

    def _keep(self, new: Held, row: int) -> None:
        base, length = self._index.longest(new)
        if base is not None and base in self._kept:
            if length == len(new.ids):
                self._used(base)
                return
            if length == len(base.ids):
                self._drop(base)  # the new one goes on from it
        if len(self._kept) >= self._most:
            self._drop(next(iter(self._kept)))
        try:
            new.place = self._cache.copy_out(row, len(new.ids))
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            self.drop_kept()
            return
        self._kept[new] = None
        self._index.add(new)

    def _used(self, held: Held) -> None:
        del self._kept[held]
        self._kept[held] = None

    def _drop(self, held: Held) -> None:
        del self._kept[held]
        self._index.remove(held)
        held.place = None
