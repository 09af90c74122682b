"""Keys and values of all running requests: one row per request, no gaps, positions per row.

In a `SlotCache` a row holds its tokens from position 0, padded on the right. Data beyond a row's length is
garbage that no mask shows and that later tokens overwrite. So rows can be added, moved and removed without
clearing.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import Cache
from transformers import __version__ as transformers_version

FIRST_CAPACITY = 128
# What the models of `transformers` call a cache that they are given. 5.24 renamed it, in all of them.
_IS_RENAMED = tuple(map(int, transformers_version.split(".")[:2])) >= (5, 24)
CACHE_NAME = "cache" if _IS_RENAMED else "past_key_values"


class RowCache(Protocol):
    """What the running batch and its prefixes ask of a cache. Out of memory is a RuntimeError that says so.

    A row is opened, with room for so many tokens, before anything is written in it. If that raises, the row
    is not open.
    """

    slots: int
    cuts: bool
    """Whether a row and a copy can be cut to any length."""

    def holds(self, place: Any, length: int) -> bool:
        """Whether a row, or a copy, can be cut to its first `length` tokens."""

    def open_row(self, row: int, *, room: int) -> None:
        """Open a row without tokens."""

    def share_row(self, source: int, target: int, length: int, *, room: int) -> None:
        """Open a row that begins with the first `length` tokens of an open row."""

    def copy_in(self, copy: Any, target: int, length: int, *, room: int) -> None:
        """Open a row that begins with the first `length` tokens of a copy."""

    def copy_out(self, row: int, length: int) -> Any:
        """Keep a row's first `length` tokens beyond its end; return the copy."""

    def drop_copy(self, copy: Any) -> None:
        """Forget a copy."""

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Let the cache drop copies for room by itself; `evict` drops one and returns False for none."""

    def move_row(self, source: int, target: int, length: int) -> None:
        """Let `target`, which is closed, be the row `source`, of `length` tokens."""

    def close_row(self, row: int) -> None:
        """Free a row, if it is open."""

    def clear_row(self, row: int) -> None:
        """Make a row with numbers that are not finite harmless for the next one in its place."""


# A row's first tokens outside the cache: the keys of each layer, [heads, length, head_dim], then the values.
RowCopy = tuple[Tensor, ...]


class SlotCache(Cache):
    """A `RowCache`: preallocated [slots, heads, capacity, head_dim] keys and values per layer.

    The capacity doubles on demand up to `max_len`, so short episodes never pay for a long context.
    `begin_prefill` and `begin_append` select the rows that a `transformers` model writes and sees.
    """

    cuts = True

    def __init__(self, *, slots: int, max_len: int, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(layers=[])
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
        """Let the next forward pass write new rows, `first_row` and on, from position 0."""
        self.reserve(length)
        self._first_row = first_row
        self._positions_BQ = None

    def begin_append(self, positions_BQ: Tensor, *, first_row: int, visible: int) -> None:
        """Let the next pass add Q tokens, at positions below `visible`, to B rows, `first_row` and on."""
        self.reserve(visible)
        self._first_row = first_row
        self._positions_BQ = positions_BQ
        rows = positions_BQ.shape[0]
        self._rows_B1 = torch.arange(first_row, first_row + rows, device=positions_BQ.device)[:, None]
        self._visible = visible

    def holds(self, place: int | RowCopy, length: int) -> bool:
        return True

    def open_row(self, row: int, *, room: int) -> None:
        self.reserve(room)

    def share_row(self, source: int, target: int, length: int, *, room: int) -> None:
        self.reserve(room)
        self.move_row(source, target, length)

    def close_row(self, row: int) -> None:
        """A row's memory is its own."""

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Copies are outside the rows' memory."""

    def drop_copy(self, copy: RowCopy) -> None:
        """A copy is freed with the last reference to it."""

    def move_row(self, source: int, target: int, length: int) -> None:
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def clear_row(self, row: int) -> None:
        """Zero a row. Garbage is harmless only while finite: a masked NaN still makes a sum NaN."""
        for tensor in (*self._keys, *self._values):
            tensor[row] = 0

    def copy_out(self, row: int, length: int) -> RowCopy:
        return tuple(tensor[row, :, :length].clone() for tensor in (*self._keys, *self._values))

    def copy_in(self, copy: RowCopy, target: int, length: int, *, room: int) -> None:
        self.reserve(room)
        for tensor, old in zip((*self._keys, *self._values), copy, strict=True):
            tensor[target, :, :length] = old[:, :length]

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
        """Keys and values of a layer; the first call allocates them, for [..., heads, length, head_dim]."""
        if number == len(self._keys):
            # Allocate both first: out of memory in between would leave a layer without values.
            sizes = (
                (self.slots, new.shape[-3], self.capacity, new.shape[-1])
                for new in (key_states, value_states)
            )
            keys, values = (key_states.new_zeros(size, dtype=self.dtype) for size in sizes)
            self._keys.append(keys)
            self._values.append(values)
        return self._keys[number], self._values[number]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row. If memory runs out, the previous contents stay valid."""
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

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def _grow(self, old: Tensor, capacity: int) -> Tensor:
        if old.shape[2] >= capacity:
            return old  # an earlier attempt enlarged this layer before memory ran out
        new = old.new_zeros((self.slots, old.shape[1], capacity, old.shape[3]))
        new[:, :, : old.shape[2]] = old
        return new
