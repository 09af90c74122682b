"""Store keys and values of all running requests: one row per request, no gaps, positions per row.

In a `SlotCache`, rows that begin alike may share their first tokens in a trunk, which is stored once
(`trunks`). A row itself holds the tokens after its trunk. The columns after a row's last token hold old data,
which masks hide and later tokens overwrite. So rows can be added, moved and removed without clearing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import Cache
from transformers import __version__ as transformers_version

from trainer_backend.inference.trunks import BLOCK, Trunk, Trunks, most_rows, pays

FIRST_CAPACITY = 128
# The name of the cache argument in the models of `transformers`, which 5.24 renamed.
_IS_RENAMED = tuple(map(int, transformers_version.split(".")[:2])) >= (5, 24)
CACHE_NAME = "cache" if _IS_RENAMED else "past_key_values"


class RowCache:
    """The cache interface of the running batch and its prefixes.

    If memory runs out, a method raises a RuntimeError that says so. The batch opens a row, with room for
    `room` tokens, before it writes to the row. If opening raises, the row is not open. A cache whose copies
    lie outside the rows' memory needs neither `drop_copy` nor `on_shortage`.
    """

    slots: int
    cuts: bool = True
    """Whether a row and a copy can be cut to any length."""

    def holds(self, place: Any, length: int) -> bool:
        """Return whether a row or a copy can be cut to its first `length` tokens."""
        return True

    def open_row(self, row: int, *, room: int) -> None:
        """Open a row without tokens."""
        raise NotImplementedError

    def share_row(self, source: int, target: int, ids: Sequence[int], *, room: int) -> None:
        """Open a row that begins with `ids`, the first tokens of an open row."""
        raise NotImplementedError

    def copy_in(self, copy: Any, target: int, ids: Sequence[int], *, room: int) -> None:
        """Open a row that begins with `ids`, the first tokens of a copy."""
        raise NotImplementedError

    def copy_out(self, row: int, length: int) -> Any:
        """Copy a row's first `length` tokens, so that they outlive the row; return the copy."""
        raise NotImplementedError

    def drop_copy(self, copy: Any) -> None:
        """Forget a copy; without this call, a copy is freed with the last reference to it."""

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Set the function that drops a copy when memory is short; `evict` returns False if there is none."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Move the row `source`, of `length` tokens, to the closed row `target`."""
        raise NotImplementedError

    def close_row(self, row: int) -> None:
        """Free a row, if it is open."""
        raise NotImplementedError

    def clear_row(self, row: int) -> None:
        """Make a row with numbers that are not finite harmless for the next row in its place."""


class RowCopy(NamedTuple):
    """A row's first tokens outside the cache: its trunk, and the tokens after the trunk."""

    trunk: Trunk | None
    tensors: tuple[Tensor, ...]
    """The keys of each layer, [heads, tokens, head_dim], then the values of each layer."""


class SlotCache(Cache, RowCache):
    """Preallocated [slots, heads, capacity, head_dim] keys and values per layer.

    The capacity doubles on demand up to `max_len`, so short episodes never pay for a long context.
    `begin_prefill` and `begin_append` select the rows that a `transformers` model writes and sees.

    If `shares` is true, a row that begins like a running row refers to a trunk (`trunks` maps rows to them),
    and the forward pass must support trunks, like `RowAttention`. If it is false, rows hold all their tokens.
    """

    def __init__(
        self, *, slots: int, max_len: int, dtype: torch.dtype = torch.float32, shares: bool = False
    ) -> None:
        super().__init__(layers=[])
        self.shares = shares
        self.trunks: dict[int, Trunk] = {}
        self._known = Trunks(most_rows(slots) * max_len)
        self.slots, self.dtype = slots, dtype
        self.max_len = max_len
        self.capacity = min(FIRST_CAPACITY, max_len)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._first_row = 0
        self._positions_BQ: Tensor | None = None
        self._rows_B1: Tensor | None = None
        self._visible = 0

    def begin_prefill(self, *, first_row: int, length: int) -> None:
        """Let the next forward pass write new rows from position 0 on; the first is row `first_row`."""
        self.reserve(length)
        self._first_row = first_row
        self._positions_BQ = None

    def begin_append(self, positions_BQ: Tensor, *, first_row: int, visible: int) -> None:
        """Let the next pass add Q tokens, at positions below `visible`, to B rows from `first_row` on."""
        self.reserve(visible)
        self._first_row = first_row
        self._positions_BQ = positions_BQ
        rows = positions_BQ.shape[0]
        self._rows_B1 = torch.arange(first_row, first_row + rows, device=positions_BQ.device)[:, None]
        self._visible = visible

    def open_row(self, row: int, *, room: int) -> None:
        self._refer(row, None, room=room)

    def share_row(self, source: int, target: int, ids: Sequence[int], *, room: int) -> None:
        trunk = self._trunk_for(source, ids) if self.shares else None
        self._begin(target, self._held(source), trunk, len(ids), room=room)

    def close_row(self, row: int) -> None:
        """Forget the row's trunk; the row's own memory stays allocated."""
        self._refer(row, None, room=0)

    def move_row(self, source: int, target: int, length: int) -> None:
        trunk = self.trunks.get(source)
        self._refer(target, trunk, room=0)
        own = length - start_behind(trunk)
        for tensor in (*self._keys, *self._values):
            # Views and copies by torch would take ten times as long for a few numbers.
            is_plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32
            rows: Any = tensor.numpy() if is_plain else tensor
            rows[target, :, :own] = rows[source, :, :own]
        self.close_row(source)

    def clear_row(self, row: int) -> None:
        """Zero a row: old data is harmless only if finite, since a masked NaN still makes a sum NaN."""
        trunk, tensors = self._held(row)
        self._known.discard(trunk)
        for tensor in tensors:
            tensor.zero_()

    def copy_out(self, row: int, length: int) -> RowCopy:
        trunk, tensors = self._held(row)
        own = length - start_behind(trunk)
        return RowCopy(trunk, tuple(tensor[:, :own].clone() for tensor in tensors))

    def copy_in(self, copy: RowCopy, target: int, ids: Sequence[int], *, room: int) -> None:
        self._begin(target, copy, self._known.find(ids), len(ids), room=room)

    def starts(self, rows: Iterable[int]) -> NDArray[np.int64]:
        """Return how many tokens of each row lie in its trunk."""
        return np.array([start_behind(self.trunks.get(row)) for row in rows], dtype=np.int64)

    def forget_trunks(self) -> None:
        """Let no row that is opened from now on refer to an existing trunk."""
        self._known.clear()

    def _refer(self, row: int, trunk: Trunk | None, *, room: int) -> None:
        """Let a row of `room` tokens, its trunk included, begin with the trunk."""
        self.reserve(room - start_behind(trunk))
        if trunk is None:
            self.trunks.pop(row, None)
        else:
            self.trunks[row] = trunk

    def _held(self, row: int) -> RowCopy:
        """Return views of a whole row, including the old data after its last token."""
        return RowCopy(self.trunks.get(row), tuple(tensor[row] for tensor in (*self._keys, *self._values)))

    def _begin(self, row: int, held: RowCopy, trunk: Trunk | None, length: int, *, room: int) -> None:
        """Open a row with its first `length` tokens taken from the trunk and from `held`."""
        first = start_behind(trunk)
        self._refer(row, trunk, room=room)
        for tensor, parts in zip(self._held(row).tensors, _parts(held, first, length), strict=True):
            column = 0
            for part in parts:
                tensor[:, column : column + part.shape[1]] = part
                column += part.shape[1]

    def _trunk_for(self, source: int, ids: Sequence[int]) -> Trunk | None:
        """Return a trunk that begins like `ids`, the first tokens of row `source`; None if there is none.

        A new trunk is made if it pays (`trunks.pays`) and has room. A row with a shorter trunk takes it.
        """
        trunk, held = self._known.find(ids), self._held(source)
        length = len(ids) // BLOCK * BLOCK
        if pays(length, trunk) and self._known.has_room(length):
            parts = _parts(held, 0, length)
            trunk = Trunk(ids[:length], tuple(torch.cat(list(tensors), dim=1) for tensors in parts))
            self._known.add(trunk)
        shift = start_behind(trunk) - start_behind(held.trunk)
        if trunk is not None and shift > 0:
            moved = [tensor[:, shift : self.capacity].clone() for tensor in held.tensors]
            for tensor, own in zip(held.tensors, moved, strict=True):
                tensor[:, : self.capacity - shift] = own
            self.trunks[source] = trunk
        return trunk

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write new keys and values of a layer and return the visible ones; attention layers call this."""
        # Under autocast, the rotary embedding produces float32.
        key_states, value_states = key_states.to(self.dtype), value_states.to(self.dtype)
        keys, values = self.layer(layer_idx, key_states, value_states)
        rows = slice(self._first_row, self._first_row + key_states.shape[0])
        if self._positions_BQ is None:
            length = key_states.shape[2]
            keys[rows, :, :length] = key_states
            values[rows, :, :length] = value_states
            return key_states, value_states
        keys[self._rows_B1, :, self._positions_BQ] = key_states.transpose(1, 2)
        values[self._rows_B1, :, self._positions_BQ] = value_states.transpose(1, 2)
        return keys[rows, :, : self._visible], values[rows, :, : self._visible]

    def layer(self, number: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Return a layer's keys and values; the first call allocates them, shaped like the arguments."""
        if number == len(self._keys):
            # Allocate both first: running out of memory in between would leave a layer without values.
            sizes = (
                (self.slots, new.shape[-3], self.capacity, new.shape[-1])
                for new in (key_states, value_states)
            )
            keys, values = (key_states.new_zeros(size, dtype=self.dtype) for size in sizes)
            self._keys.append(keys)
            self._values.append(values)
        return self._keys[number], self._values[number]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row. If memory runs out, the contents stay valid."""
        if length <= self.capacity:
            return
        assert length <= self.max_len, "the engine refuses requests longer than max_len"
        capacity = self.capacity
        while capacity < length:
            capacity = min(2 * capacity, self.max_len)
        for tensors in (self._keys, self._values):
            # One by one: the old and new tensors of all layers together may not fit.
            for layer, old in enumerate(tensors):
                tensors[layer] = self._grow(old, capacity)
        self.capacity = capacity

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._positions_BQ is None else self._visible - self._positions_BQ.shape[1]

    get_query_offset = get_seq_length

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def _grow(self, old: Tensor, capacity: int) -> Tensor:
        if old.shape[2] >= capacity:
            return old  # an earlier attempt enlarged this layer before memory ran out
        new = old.new_zeros((self.slots, old.shape[1], capacity, old.shape[3]))
        new[:, :, : old.shape[2]] = old
        return new


def start_behind(trunk: Trunk | None) -> int:
    """Return how many tokens of a row lie in its trunk."""
    return 0 if trunk is None else len(trunk)


def _parts(held: RowCopy, first: int, last: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield the tokens `first` to `last` (excluded) of each tensor of a row or copy, in up to two parts."""
    start = start_behind(held.trunk)
    for number, own in enumerate(held.tensors):
        part = own[:, max(0, first - start) : last - start] if last > start else None
        if held.trunk is None or first >= start:
            yield () if part is None else (part,)
        else:
            front = held.trunk.tensors[number][:, first : min(last, start)]
            yield (front,) if part is None else (front, part)
