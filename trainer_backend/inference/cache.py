"""Keys and values of all running requests: one row a request, rows compact, positions per row.

A row holds its tokens from position 0, padded on the right. What lies beyond a row's length is garbage that
no mask ever shows, and the next token overwrites it. So rows come, move and go without clearing anything.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

FIRST_CAPACITY = 128


class SlotCache(Cache):
    """Preallocated [slots, heads, capacity, head_dim] keys and values per layer, for `transformers` models.

    Before each forward call either `begin_prefill` or `begin_decode` says which rows the call is about.
    The capacity doubles on demand up to `max_len`, so short episodes never pay for a long context.
    """

    def __init__(self, *, slots: int, max_len: int) -> None:
        super().__init__(layers=[])
        self.slots = slots
        self.max_len = max_len
        self.capacity = min(FIRST_CAPACITY, max_len)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._first_row = 0
        self._positions_B: Tensor | None = None
        self._rows_B: Tensor | None = None
        self._visible = 0

    def begin_prefill(self, *, first_row: int, length: int) -> None:
        """The next call writes fresh rows, `first_row` and on, from position 0."""
        self._reserve(length)
        self._first_row = first_row
        self._positions_B = None

    def begin_decode(self, positions_B: Tensor, *, visible: int) -> None:
        """The next call adds one token to each of the first B rows, at its own position."""
        self._reserve(visible)
        self._positions_B = positions_B
        self._rows_B = torch.arange(positions_B.shape[0], device=positions_B.device)
        self._visible = visible

    def move_row(self, source: int, target: int, length: int) -> None:
        """Copy a row's first `length` positions over another row: how a gap is closed."""
        for tensor in (*self._keys, *self._values):
            tensor[target, :, :length] = tensor[source, :, :length]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Called by each attention layer: write the new keys and values, return all that it may look at."""
        if layer_idx == len(self._keys):
            self._keys.append(self._allocate(key_states))
            self._values.append(self._allocate(value_states))
        keys, values = self._keys[layer_idx], self._values[layer_idx]
        if self._positions_B is None:
            batch, length = key_states.shape[0], key_states.shape[2]
            rows = slice(self._first_row, self._first_row + batch)
            keys[rows, :, :length] = key_states
            values[rows, :, :length] = value_states
            return key_states, value_states
        batch = key_states.shape[0]
        keys[self._rows_B, :, self._positions_B] = key_states[:, :, 0]
        values[self._rows_B, :, self._positions_B] = value_states[:, :, 0]
        return keys[:batch, :, : self._visible], values[:batch, :, : self._visible]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0 if self._positions_B is None else self._visible - 1

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.get_seq_length(layer_idx) + query_length, 0

    def _allocate(self, like: Tensor) -> Tensor:
        return like.new_zeros((self.slots, like.shape[1], self.capacity, like.shape[3]))

    def _reserve(self, length: int) -> None:
        if length <= self.capacity:
            return
        assert length <= self.max_len, "requests longer than max_len are refused at the door"
        while self.capacity < length:
            self.capacity = min(2 * self.capacity, self.max_len)
        self._keys = [self._grown(tensor) for tensor in self._keys]
        self._values = [self._grown(tensor) for tensor in self._values]

    def _grown(self, old: Tensor) -> Tensor:
        new = self._allocate(old)
        new[:, :, : old.shape[2]] = old
        return new
