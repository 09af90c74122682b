"""Store the keys and values of all running requests, in one row per request. Rows have different lengths.

In a `SlotCache`, rows that begin with the same tokens may share these tokens in a *trunk*, which is stored
once (`trunks`). The row itself then stores only the tokens after its trunk. The columns after the last token
of a row contain old data, which attention masks hide and later tokens overwrite. So rows can be added, moved
and removed without clearing memory.
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
# The name of the argument for the cache in the models of `transformers`. Version 5.24 renamed the argument.
_IS_RENAMED = tuple(map(int, transformers_version.split(".")[:2])) >= (5, 24)
CACHE_NAME = "cache" if _IS_RENAMED else "past_key_values"


class RowCache:
    """The interface between a cache and its users: the running batch and the index of prefixes.

    If memory runs out, a method raises a RuntimeError that `models.folder.is_out_of_memory` recognizes. The
    batch opens a row before it writes to the row. Opening makes room for `room` tokens; if it raises, the row
    stays closed. Only a cache whose copies use the memory of its rows must override `drop_copy` and
    `on_shortage`.
    """

    slots: int
    cuts: bool = True
    """Whether rows and copies can be cut to any length. False if they hold states of recurrent layers."""

    def holds(self, place: Any, length: int) -> bool:
        """Return whether `place`, a row or a copy, can be cut to its first `length` tokens."""
        return True

    def open_row(self, row: int, *, room: int) -> None:
        """Open a row without tokens."""
        raise NotImplementedError

    def share_row(self, source: int, target: int, ids: Sequence[int], *, room: int) -> None:
        """Open row `target` with the tokens `ids`, which are the first tokens of the open row `source`."""
        raise NotImplementedError

    def copy_in(self, copy: Any, target: int, ids: Sequence[int], *, room: int) -> None:
        """Open row `target` with the tokens `ids`, which are the first tokens of the copy."""
        raise NotImplementedError

    def copy_out(self, row: int, length: int) -> Any:
        """Return a copy of the first `length` tokens of a row. The copy outlives the row."""
        raise NotImplementedError

    def drop_copy(self, copy: Any) -> None:
        """Free a copy. By default this does nothing: a copy is freed with the last reference to it."""

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Set `evict`, which the cache calls when memory is short.

        `evict` drops one copy, or returns False if no copy is left.
        """

    def move_row(self, source: int, target: int, length: int) -> None:
        """Move the row `source`, which has `length` tokens, to the closed row `target`."""
        raise NotImplementedError

    def close_row(self, row: int) -> None:
        """Free a row, if it is open."""
        raise NotImplementedError

    def clear_row(self, row: int) -> None:
        """Clear a row with non-finite numbers, if such numbers could spoil the next request in this row."""


class RowCopy(NamedTuple):
    """The first tokens of a row: the trunk that the row refers to, and the tokens after the trunk."""

    trunk: Trunk | None
    tensors: tuple[Tensor, ...]
    """The keys of each layer, [heads, tokens, head_dim], then the values of each layer."""


class SlotCache(Cache, RowCache):
    """A cache with preallocated keys and values for each layer, [slots, heads, capacity, head_dim].

    The capacity doubles on demand up to `max_len`, so short episodes do not take the memory of a long
    context. Call `begin_prefill` or `begin_append` before a `transformers` model runs: they select the rows
    that the model writes and reads.

    If `shares` is true, a row that begins like a running row refers to a trunk; `trunks` maps the numbers of
    such rows to their trunks. The forward pass must then support trunks, as `RowAttentions` does. If `shares`
    is false, each row stores all its tokens.
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
        """Let the next forward pass write `length` tokens, from position 0, to rows from `first_row` on."""
        self.reserve(length)
        self._first_row = first_row
        self._positions_BQ = None

    def begin_append(self, positions_BQ: Tensor, *, first_row: int, visible: int) -> None:
        """Let the next forward pass append Q tokens to each of B rows, the first of which is row `first_row`.

        `positions_BQ` are the positions of the tokens. The pass reads the positions below `visible`.
        """
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
        """Remove the row's reference to its trunk. The row's own memory stays allocated."""
        self._refer(row, None, room=0)

    def move_row(self, source: int, target: int, length: int) -> None:
        trunk = self.trunks.get(source)
        self._refer(target, trunk, room=0)
        own = length - start_behind(trunk)
        for tensor in (*self._keys, *self._values):
            # For a few numbers, torch's views and copies take ten times as long as those of numpy.
            is_plain = tensor.device.type == "cpu" and tensor.dtype == torch.float32
            rows: Any = tensor.numpy() if is_plain else tensor
            rows[target, :, :own] = rows[source, :, :own]
        self.close_row(source)

    def clear_row(self, row: int) -> None:
        """Set a row to 0. Old data is harmless only if it is finite: even a masked NaN makes a sum NaN."""
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
        """Return, for each row, how many of its tokens lie in its trunk."""
        return np.array([start_behind(self.trunks.get(row)) for row in rows], dtype=np.int64)

    def forget_trunks(self) -> None:
        """Ensure that rows opened from now on refer to none of the existing trunks."""
        self._known.clear()

    def _refer(self, row: int, trunk: Trunk | None, *, room: int) -> None:
        """Set the trunk of a row, or remove it if `trunk` is None. Make room for `room` tokens in total."""
        self.reserve(room - start_behind(trunk))
        if trunk is None:
            self.trunks.pop(row, None)
        else:
            self.trunks[row] = trunk

    def _held(self, row: int) -> RowCopy:
        """Return views of a whole row. They include the old data after the row's last token."""
        return RowCopy(self.trunks.get(row), tuple(tensor[row] for tensor in (*self._keys, *self._values)))

    def _begin(self, row: int, held: RowCopy, trunk: Trunk | None, length: int, *, room: int) -> None:
        """Open a row that begins with the first `length` tokens of `held`.

        If `trunk` is given, the row refers to it for its first tokens, and only the tokens after it are
        copied.
        """
        first = start_behind(trunk)
        self._refer(row, trunk, room=room)
        for tensor, parts in zip(self._held(row).tensors, _parts(held, first, length), strict=True):
            column = 0
            for part in parts:
                tensor[:, column : column + part.shape[1]] = part
                column += part.shape[1]

    def _trunk_for(self, source: int, ids: Sequence[int]) -> Trunk | None:
        """Return a trunk for a new row that begins with `ids`, the first tokens of row `source`, or None.

        A new trunk is made from the row `source` if it would be long enough to replace the known trunk
        (`trunks.pays`), and if the limit on trunks leaves room for it. If the returned trunk is longer than
        the trunk of row `source`, that row refers to the returned trunk from now on.
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
        """Write the new keys and values of a layer, and return those that the queries may attend to.

        The attention layers of `transformers` call this method.
        """
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
        """Return a layer's keys and values.

        The first call allocates them. The arguments then determine the number and the size of heads.
        """
        if number == len(self._keys):
            # Allocate both tensors before storing one: if memory ran out in between, the layer would lack
            # values.
            sizes = (
                (self.slots, new.shape[-3], self.capacity, new.shape[-1])
                for new in (key_states, value_states)
            )
            keys, values = (key_states.new_zeros(size, dtype=self.dtype) for size in sizes)
            self._keys.append(keys)
            self._values.append(values)
        return self._keys[number], self._values[number]

    def reserve(self, length: int) -> None:
        """Make room for `length` tokens per row. If memory runs out, the contents of the cache stay valid."""
        if length <= self.capacity:
            return
        assert length <= self.max_len, "the engine refuses requests longer than max_len"
        capacity = self.capacity
        while capacity < length:
            capacity = min(2 * capacity, self.max_len)
        for tensors in (self._keys, self._values):
            # Enlarge one tensor at a time: the old and new tensors of all layers may not fit in memory
            # together.
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
    """Return how many tokens of a row with this trunk lie in the trunk; 0 without a trunk."""
    return 0 if trunk is None else len(trunk)


def _parts(held: RowCopy, first: int, last: int) -> Iterator[tuple[Tensor, ...]]:
    """Yield, for each tensor of `held`, its tokens from `first` to `last` (excluded) in up to two parts.

    The first part comes from the trunk, and the second part from the tokens after the trunk.
    """
    start = start_behind(held.trunk)
    for number, own in enumerate(held.tensors):
        part = own[:, max(0, first - start) : last - start] if last > start else None
        if held.trunk is None or first >= start:
            yield () if part is None else (part,)
        else:
            front = held.trunk.tensors[number][:, first : min(last, start)]
            yield (front,) if part is None else (front, part)
