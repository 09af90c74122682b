"""Cache running requests of models with layers such as sliding windows, convolutions and recurrences.

Each running request is a row. A `Stack` is a cache of `transformers` for rows of different lengths. For each
kind of layer, it stores:

    attention    keys and values, [rows, heads, columns, head_dim]. All rows end at the same column, like a
                 batch that is padded on the left. So `transformers` needs only one mask [rows, columns], from
                 which each model makes the masks of its own layers (windows, chunks, sinks)
    states       the states of convolutions and recurrences, [rows, ...]. A state has no length, so it needs
                 no padding

A pass that fails leaves a stack unchanged: states are computed in copies, and the column at which rows end
moves only after all layers are done. Tokens outside a sliding window are kept too, so that a row can be cut
to any length. A state cannot be cut: it can only be copied at the length that it has.

Measured by 4d960597:bench/layer_rows.py (a CPU, tiny models, 16 rows of 40 to 240 tokens): computing the rows
one after another takes 7 to 12 times as long as computing one stack. Computing groups of rows of equal length
takes 3 to 7 times as long if there are 8 different lengths, and as long as single rows if all lengths are
arbitrary. So the engine does not form such groups.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, cache_utils

from trainer_backend.errors import ModelFolderError
from trainer_backend.inference.cache import RowCache

# When rows are moved to the front, this many free columns remain after them, so that moves are rare.
SPARE = 64
# What one layer stores of a row: keys and values [heads, length, head_dim], or states; None: no state.
LayerState = tuple[Tensor | None, ...]


class RowState(NamedTuple):
    """The contents of one row outside a stack.

    Its tensors are never written to, so rows and copies may share them.
    """

    length: int
    layers: tuple[LayerState, ...]


NO_TOKENS = RowState(0, ())


class Bounds(NamedTuple):
    """The largest size of a stack, its dtype, and the number of columns that it allocates in advance."""

    slots: int
    max_len: int
    dtype: torch.dtype
    spare: int = SPARE


class Held:
    """The storage of one layer in a `Stack`.

    This base class stores nothing. It serves layers without a cache, which may read another layer's keys and
    values.
    """

    def begin(self, rows: int, length: int) -> Any:
        """Return the cache layer that `transformers` uses in a pass over the first `rows` rows.

        `length` is the number of tokens of the longest of these rows.
        """
        return cache_utils.DummyLayer()  # type: ignore[no-untyped-call]

    def commit(self, new: int) -> None:
        """End a pass that has added `new` tokens to each of its rows."""

    def put(self, row: int, state: LayerState, *, length: int, longest: int) -> None:
        """Write `state`, which has `length` tokens, into a row.

        `longest` is the length of the longest row of the stack, this row included.
        """

    def take(self, row: int, *, first: int, last: int) -> LayerState:
        """Return views of a part of a row: it begins `first` and ends `last` tokens before the row's end."""
        return ()

    def move(self, source: int, target: int) -> None: ...

    def clear(self, row: int) -> None: ...


class Attention(cache_utils.DynamicLayer, Held):  # type: ignore[no-untyped-call]
    """The keys and values of one layer. All rows end at the same column, `_end`."""

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
        """Write the new tokens of a pass, and return the keys and values that its rows may attend to."""
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
        """Set a row to 0, because old data may contain NaN, and even a masked NaN makes a sum NaN."""
        for held in self._held:
            held[row : row + 1] = 0

    @property
    def _shown(self) -> int:
        return self._longest if self._window is None else min(self._longest, self._window - 1)

    def _reserve(self, rows: int, new: int, *like: Tensor) -> None:
        """Make room for `new` more tokens in each of the first `rows` rows.

        New tensors get their sizes and device from `like`, a key and a value tensor. If memory runs out,
        nothing changes.
        """
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


class States(Held):
    """The states of one layer, as pairs of a convolution's state and a recurrence's state."""

    def __init__(self, bounds: Bounds, *, states: int) -> None:
        self._bounds, self._states = bounds, states
        self._held: list[Tensor | None] = [None] * (2 * states)
        self._layer = self.begin(0, 0)

    def begin(self, rows: int, length: int) -> Any:
        """Return a cache layer with copies of the states, because some models overwrite their inputs."""
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
        """Write the states of a row; the states of a row without tokens are 0."""
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


# How to make the storage of a layer, by the name of the class that `transformers` uses for the layer's cache.
_KINDS: dict[str, Callable[[Any, Bounds], Held]] = {
    "DynamicLayer": lambda layer, bounds: Attention(bounds),
    "DynamicSlidingWindowLayer": lambda layer, bounds: Attention(bounds, window=layer.sliding_window),
    "LinearAttentionLayer": lambda layer, bounds: States(bounds, states=layer.number_of_states),
    "DummyLayer": lambda layer, bounds: Held(),
}


def held_layers(config: PreTrainedConfig, bounds: Bounds) -> list[Held]:
    """Return a `Held` for each layer of a model.

    Raises:
        ModelFolderError: the model has a layer whose kind of cache is not supported.
    """
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
    """The cache of rows that are computed together. A pass computes the first rows of the stack."""

    def __init__(self, config: PreTrainedConfig, bounds: Bounds) -> None:
        self._held = held_layers(config, bounds)
        super().__init__(layers=[held.begin(0, 0) for held in self._held])
        self.cuts = not any(isinstance(held, States) for held in self._held)
        self.lengths: list[int] = []

    def begin(self, rows: int) -> None:
        """Begin a pass that adds tokens to the first `rows` rows."""
        longest = max(self.lengths[:rows])
        self.layers = [held.begin(rows, longest) for held in self._held]

    def commit(self, rows: int, new: int) -> None:
        """End a pass that has added `new` tokens to each of the first `rows` rows."""
        for held in self._held:
            held.commit(new)
        self.lengths[:rows] = [length + new for length in self.lengths[:rows]]

    def mask(self, rows: int) -> Tensor | None:
        """Return an attention mask [rows, columns], true at each row's tokens and at the token to be added.

        Return None if the rows have equal lengths, because the mask would be true everywhere.
        """
        longest = max(self.lengths[:rows])
        missing = [longest - length for length in self.lengths[:rows]]
        if not any(missing):
            return None
        return torch.arange(longest + 1) >= torch.tensor(missing)[:, None]

    def put(self, row: int, state: RowState) -> None:
        """Write `state` into an existing row, or append it as the next row."""
        lengths = [*self.lengths[:row], state.length, *self.lengths[row + 1 :]]
        layers = state.layers or ((),) * len(self._held)
        for held, layer in zip(self._held, layers, strict=True):
            held.put(row, layer, length=state.length, longest=max(lengths))
        self.lengths = lengths

    def take(self, row: int, length: int) -> RowState:
        """Return views of a row's first `length` tokens."""
        whole = self.lengths[row]
        return RowState(length, tuple(h.take(row, first=whole, last=whole - length) for h in self._held))

    def move(self, source: int, target: int) -> None:
        """Overwrite row `target` with the last row, `source`."""
        for held in self._held:
            held.move(source, target)
        self.lengths[target] = self.lengths[source]

    def clear(self, row: int) -> None:
        for held in self._held:
            held.clear(row)


class LayerCache(RowCache):
    """The cache of running requests. A row is in `waiting` until its first decode step, then in `stack`."""

    def __init__(self, config: PreTrainedConfig, bounds: Bounds) -> None:
        self.slots = bounds.slots
        self.stack = Stack(config, bounds)
        self.waiting: dict[int, RowState] = {}
        self.cuts = self.stack.cuts

    def holds(self, place: Any, length: int) -> bool:
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
        # A view would keep the memory of all rows that were computed together from being freed.
        copies = [tuple(None if tensor is None else tensor.clone() for tensor in of) for of in state.layers]
        return RowState(length, tuple(copies))

    def move_row(self, source: int, target: int, length: int) -> None:
        if source in self.waiting:
            self.waiting[target] = self.waiting.pop(source)
        else:
            self.stack.move(source, target)
            self.waiting.pop(target, None)

    def close_row(self, row: int) -> None:
        self.waiting.pop(row, None)

    def clear_row(self, row: int) -> None:
        self.stack.clear(row)

    def enter(self, rows: int) -> None:
        """Move the waiting rows into the stack, which then contains exactly the first `rows` rows."""
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
