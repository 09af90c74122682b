"""Share the first tokens of several rows in a trunk, so that their keys and values are stored once.

Rows with similar beginnings should find the same trunk, although they diverge at slightly different tokens.
Therefore, the length of a trunk is a multiple of BLOCK, and a longer trunk is preferred only if it is twice
as long. A trunk exists until no row, and no copy of a row, refers to it. The total number of tokens in
existing trunks is limited. If a new trunk would exceed the limit, rows store their first tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

# The lengths of trunks are multiples of this number.
BLOCK = 32
# A longer trunk is preferred if it is at least this many times as long: its rows no longer share the shorter
# trunk.
_LONGER = 2


def most_rows(slots: int) -> int:
    """Return the largest total size of the trunks of a cache with `slots` slots, in rows of full length.

    The trunk of eight siblings takes an eighth of the memory of their rows. With one slot, the result is 0.
    """
    return (slots + 2) // 4


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trunk:
    """The first tokens that several rows share.

    `tensors` contains the keys of each layer, [heads, tokens, head_dim], then the values of each layer.
    """

    ids: Sequence[int]
    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tensors[number], self.tensors[len(self.tensors) // 2 + number]


class Trunks:
    """The trunks to which new rows may refer. Together, all trunks have at most `most_tokens` tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._known: WeakSet[Trunk] = WeakSet()
        self._living: WeakSet[Trunk] = WeakSet()

    def has_room(self, length: int) -> bool:
        """Return whether the limit permits another trunk of this length."""
        return sum(map(len, self._living)) + length <= self._most_tokens

    def add(self, trunk: Trunk) -> None:
        self._known.add(trunk)
        self._living.add(trunk)

    def find(self, ids: Sequence[int]) -> Trunk | None:
        """Return the trunk to which a row that begins with `ids` should refer, or None."""
        best: Trunk | None = None
        for trunk in sorted(self._known, key=len):
            if pays(len(trunk), best) and ids[: len(trunk)] == trunk.ids:
                best = trunk
        return best

    def discard(self, trunk: Trunk | None) -> None:
        """Stop offering a trunk to new rows. Rows that refer to it keep it."""
        if trunk is not None:
            self._known.discard(trunk)

    def clear(self) -> None:
        """Stop offering all trunks to new rows, because the trunks were computed with old weights."""
        self._known.clear()


def pays(length: int, known: Trunk | None) -> bool:
    """Return whether a row should use a trunk of this length instead of `known` (None: no trunk)."""
    return length >= (BLOCK if known is None else _LONGER * len(known))
