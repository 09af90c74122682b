"""Rows of models whose layers keep something other than keys and values of every position.

A `Stack` is a cache of `transformers` for rows of different lengths:

    attention    [rows, heads, columns, head_dim] keys and values. All rows end at one column, as a batch that
                 is padded on the left does: so a mask [rows, columns] tells `transformers` everything, and
                 each model makes the masks of its own layers (windows, chunks, sinks) of it
    states       [rows, ...] of convolutions and recurrences. They have no length, so nothing is padded

A pass that fails leaves a stack as it was, since states are computed in copies, and the column where rows end
moves only when all layers are through. What a window hides is kept, so that a row can be cut to any length; a
state cannot be cut, only be copied where it is.

Measured by 4d960597:bench/layer_rows.py (a CPU, tiny models, 16 rows of 40 to 240 tokens): one row after
another takes 7 to 12 times as long as a stack. Cohorts of rows that happen to have one length take 3 to 7
times as long where there are 8 lengths, and as long as single rows where lengths are any: so there are none.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils

from trainer_backend.errors import ModelFolderError

# Columns that are free after rows were moved to the front, so that they are rarely moved.
SPARE = 64
# What a row has of one layer: keys and values [heads, length, head_dim], or states; None where it has none.
LayerState = tuple[Tensor | None, ...]


class RowState(NamedTuple):
    """A row outside a stack. Its tensors are never written to: rows and copies may share them."""

    length: int
    layers: tuple[LayerState, ...]


NO_TOKENS = RowState(0, ())


class Bounds(NamedTuple):
    """The most rows and columns of a stack, what it keeps numbers in, and the columns that it leaves free."""

    slots: int
    max_len: int
    dtype: torch.dtype
    spare: int = SPARE


class Held(Protocol):
    """What a stack holds of one layer."""

    def begin(self, rows: int, length: int) -> Any:
        """The layer for a pass of the first rows, the longest of which has `length` tokens."""

    def commit(self, new: int) -> None:
        """The pass has come to its end: each of its rows has so many tokens more."""

    def put(self, row: int, state: LayerState, *, length: int, longest: int) -> None:
        """Write a row of `length` tokens; `longest` is that of all rows, this one included."""

    def take(self, row: int, *, first: int, last: int) -> LayerState:
        """A row's tokens from the `first` to the `last`, counted back from its end; views."""

    def move(self, source: int, target: int) -> None: ...

    def clear(self, row: int) -> None: ...


class Attention(cache_utils.DynamicLayer):  # type: ignore[no-untyped-call]
    """Keys and values of a layer, whose rows all end before the column `end`."""

    def __init__(self, bounds: Bounds, *, window: int | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._bounds, self._window = bounds, window
        self.is_sliding = window is not None
        self._held: tuple[Tensor, ...] = ()
        self._end = 0
        self._longest = 0

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Write the new tokens of rows; return what these rows see. Attention layers call this."""
        rows, new = key_states.shape[0], key_states.shape[2]
        self._reserve(rows, new, key_states, value_states)
        seen = slice(self._end - self._shown, self._end + new)
        for held, states in zip(self._held, (key_states, value_states), strict=True):
            held[:rows, :, self._end : self._end + new] = states
        keys, values = (held[:rows, :, seen] for held in self._held)
        return keys, values

    def get_seq_length(self) -> int:
        return self._longest

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._shown + query_length, self._longest - self._shown

    def begin(self, rows: int, length: int) -> "Attention":
        self._longest = length
        return self

    def commit(self, new: int) -> None:
        self._end += new

    def put(self, row: int, state: LayerState, *, length: int, longest: int) -> None:
        own = [tensor for tensor in state if tensor is not None]
        if not own:
            return
        self._longest = longest
        self._reserve(row + 1, 0, *own)
        for held, tensor in zip(self._held, own, strict=True):
            held[row, :, self._end - length : self._end] = tensor

    def take(self, row: int, *, first: int, last: int) -> LayerState:
        return tuple(held[row, :, self._end - first : self._end - last] for held in self._held)

    def move(self, source: int, target: int) -> None:
        for held in self._held:
            held[target] = held[source]

    def clear(self, row: int) -> None:
        """Zero a row. Garbage is harmless only while finite: a masked NaN still makes a sum NaN."""
        for held in self._held:
            held[row : row + 1] = 0

    @property
    def _shown(self) -> int:
        return self._longest if self._window is None else min(self._longest, self._window - 1)

    def _reserve(self, rows: int, new: int, *like: Tensor) -> None:
        """Make room for `new` tokens more of so many rows. If memory runs out, nothing has changed."""
        least, longest = self._longest + new, self._longest
        held_rows, columns = (self._held[0].shape[0], self._held[0].shape[2]) if self._held else (0, 0)
        if rows <= held_rows and longest <= self._end and self._end + new <= columns:
            return
        if rows > held_rows:
            held_rows = min(max(rows, 2 * held_rows), self._bounds.slots)
        if least + self._bounds.spare > columns:
            wanted = max(2 * columns, least + self._bounds.spare)
            columns = max(least, min(wanted, self._bounds.max_len + self._bounds.spare))
        kept = min(self._end, longest)
        moved = []
        for number, tensor in enumerate(like):
            sizes = held_rows, tensor.shape[-3], columns, tensor.shape[-1]
            room = tensor.new_zeros(sizes, dtype=self._bounds.dtype)
            if self._held:
                old = self._held[number][:, :, self._end - kept : self._end]
                room[: len(old), :, longest - kept : longest] = old
            moved.append(room)
        self._held, self._end = tuple(moved), longest


class States:
    """The states of a layer: of convolutions and recurrences, in turn."""

    def __init__(self, bounds: Bounds, *, states: int) -> None:
        self._bounds, self._states = bounds, states
        self._held: list[Tensor | None] = [None] * (2 * states)
        self._layer = self.begin(0, 0)

    def begin(self, rows: int, length: int) -> Any:
        """A layer over copies: some models write to what they are given."""
        layer: Any = cache_utils.LinearAttentionLayer(number_of_states=self._states)
        self._layer = layer
        for number in range(self._states):
            conv, recurrent = (
                None if held is None else held[:rows].clone()
                for held in self._held[2 * number : 2 * number + 2]
            )
            if conv is not None:
                layer.conv_states[number] = conv
                layer.is_conv_states_initialized[number] = layer.has_previous_state[number] = True
                layer.conv_kernel_size[number] = conv.shape[-1]
                layer.dtype, layer.device = conv.dtype, conv.device
            if recurrent is not None:
                layer.recurrent_states[number] = recurrent
                layer.is_recurrent_states_initialized[number] = layer.has_previous_state[number] = True
        return layer

    def commit(self, new: int) -> None:
        pairs = zip(self._layer.conv_states.values(), self._layer.recurrent_states.values(), strict=True)
        self._held = [state for pair in pairs for state in pair]

    def put(self, row: int, state: LayerState, *, length: int, longest: int) -> None:
        """A row without tokens has states of zeros."""
        for number, own in enumerate(state or [None] * len(self._held)):
            held = self._held[number]
            like = own if held is None else held[0]
            if like is None:
                continue
            if held is None or row >= len(held):
                rows = min(max(row + 1, 2 * row), self._bounds.slots)
                room = like.new_zeros((rows, *like.shape))
                if held is not None:
                    room[: len(held)] = held
                held = self._held[number] = room
            held[row] = 0 if own is None else own

    def take(self, row: int, *, first: int, last: int) -> LayerState:
        return tuple(None if held is None else held[row] for held in self._held)

    def move(self, source: int, target: int) -> None:
        for held in self._held:
            if held is not None:
                held[target] = held[source]

    def clear(self, row: int) -> None:
        for held in self._held:
            if held is not None:
                held[row : row + 1] = 0


class Nothing:
    """A layer that keeps nothing, or reads what another one keeps."""

    def begin(self, rows: int, length: int) -> Any:
        return cache_utils.DummyLayer()  # type: ignore[no-untyped-call]

    def commit(self, new: int) -> None: ...

    def put(self, row: int, state: LayerState, *, length: int, longest: int) -> None: ...

    def take(self, row: int, *, first: int, last: int) -> LayerState:
        return ()

    def move(self, source: int, target: int) -> None: ...

    def clear(self, row: int) -> None: ...


# By the class that `transformers` takes for a layer: what holds it in a stack.
_KINDS: dict[str, Callable[[Any, Bounds], Held]] = {
    "DynamicLayer": lambda layer, bounds: Attention(bounds),
    "DynamicSlidingWindowLayer": lambda layer, bounds: Attention(bounds, window=layer.sliding_window),
    "LinearAttentionLayer": lambda layer, bounds: States(bounds, states=layer.number_of_states),
    "DummyLayer": lambda layer, bounds: Nothing(),
}


def held_layers(config: PreTrainedConfig, bounds: Bounds) -> list[Held]:
    """What holds each layer of a model; another kind than these is refused by name."""
    layers = DynamicCache(config=config).layers
    for number, layer in enumerate(layers):
        if type(layer).__name__ not in _KINDS:
            kind = config.get_text_config().layer_types[number]
            raise ModelFolderError(
                f"layer {number} is {kind}, whose cache ({type(layer).__name__}) the engine cannot copy",
                where="model",
                hint='Sample at vLLM servers: inference.engine = "vllm".',
            )
    return [_KINDS[type(layer).__name__](layer, bounds) for layer in layers]


class Stack(Cache):
    """Rows that compute together, the first ones of each tensor."""

    def __init__(self, config: PreTrainedConfig, bounds: Bounds) -> None:
        self._held = held_layers(config, bounds)
        super().__init__(layers=[held.begin(0, 0) for held in self._held])
        self.cuts = not any(isinstance(held, States) for held in self._held)
        self.lengths: list[int] = []

    def begin(self, rows: int) -> None:
        """The next pass adds tokens to the first `rows`."""
        longest = max(self.lengths[:rows])
        self.layers = [held.begin(rows, longest) for held in self._held]

    def commit(self, rows: int, new: int) -> None:
        """The pass has come to its end."""
        for held in self._held:
            held.commit(new)
        self.lengths[:rows] = [length + new for length in self.lengths[:rows]]

    def mask(self, rows: int) -> Tensor | None:
        """[rows, columns] of what rows may see, their next token included; None where it is everything."""
        longest = max(self.lengths[:rows])
        missing = [longest - length for length in self.lengths[:rows]]
        if not any(missing):
            return None
        return torch.arange(longest + 1) >= torch.tensor(missing)[:, None]

    def put(self, row: int, state: RowState) -> None:
        """Write a row: the next one, or one in the place of another."""
        lengths = [*self.lengths[:row], state.length, *self.lengths[row + 1 :]]
        layers = state.layers or ((),) * len(self._held)
        for held, layer in zip(self._held, layers, strict=True):
            held.put(row, layer, length=state.length, longest=max(lengths))
        self.lengths = lengths

    def take(self, row: int, length: int) -> RowState:
        """A row's first `length` tokens; views of the stack."""
        whole = self.lengths[row]
        return RowState(length, tuple(h.take(row, first=whole, last=whole - length) for h in self._held))

    def move(self, source: int, target: int) -> None:
        """Let `target` be the last row, `source`."""
        for held in self._held:
            held.move(source, target)
        self.lengths[target] = self.lengths[source]

    def clear(self, row: int) -> None:
        for held in self._held:
            held.clear(row)


class LayerCache:
    """A `RowCache` of rows in a stack, and of rows that wait outside it until their first step."""

    def __init__(self, config: PreTrainedConfig, bounds: Bounds) -> None:
        self.slots = bounds.slots
        self.stack = Stack(config, bounds)
        self.waiting: dict[int, RowState] = {}
        self.cuts = self.stack.cuts

    def holds(self, place: Any, length: int) -> bool:
        """Whether a row, or a copy, can be cut to its first `length` tokens."""
        if self.cuts:
            return True
        whole = place.length if isinstance(place, RowState) else self._length(place)
        return bool(whole == length)

    def open_row(self, row: int, *, room: int) -> None:
        self.waiting[row] = NO_TOKENS

    def share_row(self, source: int, target: int, ids: Sequence[int], *, room: int) -> None:
        shared = self.waiting.get(source)
        length = len(ids)
        self.waiting[target] = self.copy_out(source, length) if shared is None else self._cut(shared, length)

    def copy_in(self, copy: RowState, target: int, ids: Sequence[int], *, room: int) -> None:
        self.waiting[target] = self._cut(copy, len(ids))

    def copy_out(self, row: int, length: int) -> RowState:
        assert self.holds(row, length), f"a state of {self._length(row)} tokens is none of {length}"
        held = self.waiting.get(row)
        state = self.stack.take(row, length) if held is None else self._cut(held, length)
        # A view would keep the memory of all rows that were computed with it.
        copies = [tuple(None if tensor is None else tensor.clone() for tensor in of) for of in state.layers]
        return RowState(length, tuple(copies))

    def drop_copy(self, copy: RowState) -> None:
        """A copy is freed with the last reference to it."""

    def on_shortage(self, evict: Callable[[], bool]) -> None:
        """Copies are outside the rows' memory."""

    def move_row(self, source: int, target: int, length: int) -> None:
        if source in self.waiting:
            self.waiting[target] = self.waiting.pop(source)
        else:
            self.stack.move(source, target)
            self.waiting.pop(target, None)

    def close_row(self, row: int) -> None:
        self.waiting.pop(row, None)

    def clear_row(self, row: int) -> None:
        """Zero a row with numbers that are not finite; see `Attention.clear`."""
        self.stack.clear(row)

    def enter(self, rows: int) -> None:
        """Write the rows that wait into the stack, which has the first `rows` then."""
        del self.stack.lengths[rows:]
        for row in sorted(self.waiting):
            self.stack.put(row, self.waiting[row])
            del self.waiting[row]

    def _length(self, row: int) -> int:
        return self.waiting[row].length if row in self.waiting else self.stack.lengths[row]

    def _cut(self, state: RowState, length: int) -> RowState:
        if state.length == length:
            return state
        layers = (tuple(None if t is None else t[:, :length] for t in layer) for layer in state.layers)
        return RowState(length, tuple(layers))
