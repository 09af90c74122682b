"""Trunks: first tokens of several rows, whose keys and values are kept once and which the rows refer to.

Rows that begin alike should find the same trunk, though they part at slightly different tokens: so trunks end
with a block, and one is preferred to others that are longer by less than its own length. A trunk lives as
long as a row, or a copy of one, refers to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakSet

from torch import Tensor

# Lengths of trunks are multiples.
BLOCK = 32
# A longer one that is made, or preferred, is longer by this factor: its rows leave the group of the other.
_LONGER = 2


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
    """The trunks that new rows may refer to."""

    def __init__(self) -> None:
        self._live: WeakSet[Trunk] = WeakSet()

    def add(self, trunk: Trunk) -> None:
        self._live.add(trunk)

    def find(self, ids: Sequence[int]) -> Trunk | None:
        """Return the trunk that a row which begins with `ids` should refer to."""
        best: Trunk | None = None
        for trunk in sorted(self._live, key=len):
            if pays(len(trunk), best) and ids[: len(trunk)] == trunk.ids:
                best = trunk
        return best

    def discard(self, trunk: Trunk | None) -> None:
        """Let no new row refer to a trunk."""
        if trunk is not None:
            self._live.discard(trunk)

    def clear(self) -> None:
        """Let no new row refer to any of them: what they hold was computed with old weights."""
        self._live.clear()


def pays(length: int, known: Trunk | None) -> bool:
    """Whether a trunk of some length should be referred to in place of a known one, which is shorter."""
    return length >= (BLOCK if known is None else _LONGER * len(known))
