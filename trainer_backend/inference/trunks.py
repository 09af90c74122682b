"""Trunks: first tokens of several rows, whose keys and values are kept once and which the rows refer to.

Rows that begin alike should find the same trunk, though they part at slightly different tokens: so trunks end
with a block, and one is preferred to others that are longer by less than its own length. A trunk lives as
long as a row, or a copy of one, refers to it. All that live have a bounded number of tokens; beyond it rows
hold theirs themselves.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

# Lengths of trunks are multiples.
BLOCK = 32
# A longer one that is made, or preferred, is longer by this factor: its rows leave the group of the other.
_LONGER = 2


def most_rows(slots: int) -> int:
    """How many longest rows all trunks of an engine with so many slots may have the tokens of.

    A group of eight siblings takes an eighth of its rows; of a single slot nothing is shared.
    """
    return (slots + 2) // 4


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Trunk:
    """Tokens, and of each layer their keys, [heads, tokens, head_dim], then the values of each."""

    ids: Sequence[int]
    tensors: tuple[Tensor, ...]

    def __len__(self) -> int:
        return len(self.ids)

    def layer(self, number: int) -> tuple[Tensor, Tensor]:
        """Keys and values of a layer."""
        return self.tensors[number], self.tensors[len(self.tensors) // 2 + number]


class Trunks:
    """The trunks that new rows may refer to, of at most so many tokens together with those that live on."""

    def __init__(self, most_tokens: int) -> None:
        self._most_tokens = most_tokens
        self._known: WeakSet[Trunk] = WeakSet()
        self._living: WeakSet[Trunk] = WeakSet()

    def has_room(self, length: int) -> bool:
        """Whether one more trunk of this length may be made."""
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
        """Let no new row refer to any of them: what they hold was computed with old weights."""
        self._known.clear()


def pays(length: int, known: Trunk | None) -> bool:
    """Whether a trunk of some length should be referred to in place of a known one, which is shorter."""
    return length >= (BLOCK if known is None else _LONGER * len(known))
