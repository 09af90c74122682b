"""Share first tokens of several rows in trunks, whose keys and values are stored once.

Rows that begin alike should find the same trunk, though they part at slightly different tokens: so the length
of a trunk is a multiple of BLOCK, and a longer trunk is preferred only if it is twice as long. A trunk lives
as long as a row, or a copy of a row, refers to it. The tokens of all living trunks are bounded; beyond the
bound, rows hold their first tokens themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

# The lengths of trunks are multiples of this number.
BLOCK = 32
# The least ratio of lengths at which a longer trunk is preferred, since its rows leave the shorter one.
_LONGER = 2


def most_rows(slots: int) -> int:
    """Return the limit on the tokens of all trunks, as a number of rows of full length, for `slots` slots.

    The trunk of eight siblings takes an eighth of their rows; a single slot shares nothing.
    """
    return (slots + 2) // 4


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trunk:
    """Token ids, and in `tensors` the keys of each layer, [heads, tokens, head_dim], then the values."""

    ids: Sequence[int]
    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        return self.tensors[number], self.tensors[len(self.tensors) // 2 + number]


class Trunks:
    """The trunks that new rows may refer to. All living trunks have at most `most_tokens` tokens."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._known: WeakSet[Trunk] = WeakSet()
        self._living: WeakSet[Trunk] = WeakSet()

    def has_room(self, length: int) -> bool:
        """Return whether another trunk of this length may be made."""
        return sum(map(len, self._living)) + length <= self._most_tokens

    def add(self, trunk: Trunk) -> None:
        self._known.add(trunk)
        self._living.add(trunk)

    def find(self, ids: Sequence[int]) -> Trunk | None:
        """Return the trunk that a row which begins with `ids` should refer to."""
        best: Trunk | None = None
        for trunk in sorted(self._known, key=len):
            if pays(len(trunk), best) and ids[: len(trunk)] == trunk.ids:
                best = trunk
        return best

    def discard(self, trunk: Trunk | None) -> None:
        """Let no new row refer to a trunk."""
        if trunk is not None:
            self._known.discard(trunk)

    def clear(self) -> None:
        """Let no new row refer to the trunks, which were computed with old weights."""
        self._known.clear()


def pays(length: int, known: Trunk | None) -> bool:
    """Return whether a longer trunk of this length should replace the known trunk."""
    return length >= (BLOCK if known is None else _LONGER * len(known))
