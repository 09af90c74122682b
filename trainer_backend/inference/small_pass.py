"""Compute each forward pass of a small decoder by one C call (`models/cpu_pass.c`), on a CPU in float32.

Python spends some microseconds between two torch operators. A forward pass of a model with fewer than a
million parameters has fifty such gaps. Together they take longer than the matrix products, and they block the
threads that serve requests. A C call has no such gaps, and releases Python's global interpreter lock.
"""

import ctypes
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainer_backend.inference.cache import SlotCache
from trainer_backend.inference.decoder import Decoder, Product
from trainer_backend.inference.row_attention import list_tokens
from trainer_backend.inference.trunks import Trunk
from trainer_backend.models.cpu_kernels import CpuKernels

Wholes = NDArray[np.int64]
Floats = NDArray[np.float64]
# The most weights of all matrix products together. More weights do not fit in a core's caches, and their
# products take longer than the gaps between the operators.
MOST_WEIGHTS = 4_000_000
# The largest value of tokens * visible keys * heads * head size of a row. For longer rows torch is faster,
# since it computes many queries together (measured on a CPU).
MOST_ATTENTION = 20_000_000
# The most query heads per key head for which the C source has room.
_MOST_QUERIES = 256


class _Matrix(ctypes.Structure):
    """The C type `struct matrix`. Each `Structure` below is the C struct with the same name."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("panels", "bias")),
        *((name, ctypes.c_int64) for name in ("outputs", "inputs")),
    ]


class _Layer(ctypes.Structure):
    products = ("query_key_value", "out", "gate_up", "down")
    _fields_ = [
        *((name, _Matrix) for name in products),
        *((name, ctypes.c_void_p) for name in ("attention_norm", "query_norm", "key_norm", "mlp_norm")),
        *((name, ctypes.c_void_p) for name in ("keys", "values")),
        *((name, ctypes.c_int64) for name in ("key_room", "value_room")),
    ]


class _Model(ctypes.Structure):
    _fields_ = [
        ("layers", ctypes.c_void_p),
        ("head", _Matrix),
        *((name, ctypes.c_void_p) for name in ("embedding", "norm", "cos", "sin")),
        *((name, ctypes.c_int64) for name in ("layer_count", "width", "heads", "kv_heads", "size", "mlp")),
        ("eps", ctypes.c_float),
    ]


class _Trunk(ctypes.Structure):
    _fields_ = [*((name, ctypes.c_void_p) for name in ("keys", "values")), ("length", ctypes.c_int64)]


class _Tokens(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("id", "position", "row", "column", "trunk")),
        ("count", ctypes.c_int64),
    ]


class _Front:
    """A trunk as a C struct at `address`; this object also keeps the tensors to which the struct points."""

    def __init__(self, trunk: Trunk) -> None:
        self._tensors = [tensor.contiguous() for tensor in trunk.tensors]
        self._places = np.array([tensor.data_ptr() for tensor in self._tensors], dtype=np.uint64)
        keys = _address(self._places)
        self._struct = _Trunk(keys, keys + self._places.nbytes // 2, len(trunk))
        self.address = ctypes.addressof(self._struct)


class SmallPass:
    """Computes the forward passes of a small decoder over the rows of a cache, for the engine thread only.

    The passes read a reordered copy of the decoder's weights, which `take_weights` updates.
    """

    def __init__(self, decoder: Decoder, cache: SlotCache, kernels: CpuKernels) -> None:
        self._decoder, self._cache, self._kernels = decoder, cache, kernels
        self._fronts: WeakKeyDictionary[Trunk, _Front] = WeakKeyDictionary()
        self._layers = (_Layer * len(decoder.layers))()
        self._kept: list[Tensor] = []  # the tensors that the structs point to
        self._panels: list[tuple[Tensor, Tensor]] = []  # (reordered copy, weight)
        self._fill_structs()
        self.take_weights()
        # Keys or values of no token: the cache reads the shape of the tensors to allocate from them.
        heads = decoder.heads
        self._none = decoder.embedding.new_empty((heads.keys, 0, heads.size))

    def take_weights(self) -> None:
        """Compute with the decoder's new weights from now on. This allocates nothing and cannot fail."""
        for panels, weight in self._panels:
            (outputs, inputs), panel = weight.shape, self._kernels.panel
            whole, rest = divmod(outputs, panel)
            panels[:whole] = weight[: whole * panel].view(whole, panel, inputs).transpose(1, 2)
            if rest:
                panels[whole, :, :rest] = weight[whole * panel :].t()

    def _fill_structs(self) -> None:
        decoder, heads, turns = self._decoder, self._decoder.heads, self._decoder.turns
        for layer, packed in zip(decoder.layers, self._layers, strict=True):
            for name in _Layer.products:
                setattr(packed, name, self._matrix(getattr(layer, name)))
            packed.attention_norm = self._keep(layer.attention_norm.weight)
            packed.mlp_norm = self._keep(layer.mlp_norm.weight)
            if layer.head_norms is not None:
                packed.query_norm = self._keep(layer.head_norms.queries.weight)
                packed.key_norm = self._keep(layer.head_norms.keys.weight)
        assert isinstance(decoder.head, Product), "`small_pass` has checked the head"
        tensors = decoder.embedding, decoder.norm.weight, turns.cos_T1D, turns.sin_T1D
        self._model = _Model(
            ctypes.addressof(self._layers), self._matrix(decoder.head), *map(self._keep, tensors),
            len(decoder.layers), decoder.embedding.shape[1], heads.queries, heads.keys, heads.size,
            decoder.layers[0].down.weight.shape[1], decoder.norm.eps,
        )  # fmt: skip

    def pays(self, starts_B: Wholes, counts_B: Wholes) -> bool:
        """Return whether `prefill` computes these rows at least as fast as torch does."""
        seen = int((counts_B * (starts_B + counts_B)).max())
        return bool(seen * self._model.heads * self._model.size <= MOST_ATTENTION)

    def prefill(self, ids_T: Wholes, *, first_row: int, starts_B: Wholes, counts_B: Wholes) -> None:
        """Store keys and values of `counts_B[i]` tokens in row `first_row` + i, from `starts_B[i]` on."""
        self._run(ids_T, *list_tokens(first_row, starts_B, counts_B))

    def logits(self, ids_B: Wholes, cached_B: Wholes) -> NDArray[np.float32]:
        """Feed one token to each of the first B rows, which have `cached_B` tokens; return logits [B, V]."""
        logits_BV = self._logits(len(ids_B))
        self._run(ids_B, np.arange(len(ids_B)), cached_B, logits_BV)
        return logits_BV

    def step(
        self, ids_B: Wholes, cached_B: Wholes, temperatures_B: Floats, uniforms_B: Floats
    ) -> tuple[Wholes, Floats]:
        """Feed tokens like `logits` and sample like `sampler.sample`; return ids and log-probs, [B] each."""
        count = len(ids_B)
        logits_BV = self._logits(count)
        drawn = np.empty(count, np.int64), np.empty(count, np.float64)
        self._run(ids_B, np.arange(count), cached_B, logits_BV, temperatures_B, uniforms_B, *drawn)
        return drawn

    def _logits(self, rows: int) -> NDArray[np.float32]:
        """Allocate logits by torch, because the engine recognises torch's out-of-memory error."""
        return torch.empty((rows, self._model.head.outputs)).numpy()

    def _run(
        self,
        ids_T: Wholes,
        rows_T: Wholes,
        positions_T: Wholes,
        *numbers: NDArray[Any],
    ) -> None:
        """Run a pass. `numbers`: the first 0 to 5 of logits, temperatures, uniforms, ids and log-probs."""
        starts, fronts = self._read_trunks(int(rows_T[-1]) + 1)
        columns_T = positions_T - starts[rows_T]
        self._cache.reserve(int(columns_T.max()) + 1)
        for number, layer in enumerate(self._layers):
            keys, values = self._cache.layer(number, self._none, self._none)
            layer.keys, layer.values = keys.data_ptr(), values.data_ptr()
            layer.key_room, layer.value_room = keys.shape[2], values.shape[2]
        arrays = ids_T, positions_T, rows_T, columns_T, fronts[rows_T]
        tokens = _Tokens(*map(_address, arrays), len(ids_T))
        places = [*map(_address, numbers), *[None] * (5 - len(numbers))]
        self._kernels.small_pass(self._model, tokens, *places)

    def _read_trunks(self, rows: int) -> tuple[Wholes, NDArray[np.uint64]]:
        """Return the length and the address of each row's trunk, [rows] each; both are 0 without a trunk."""
        starts, fronts = np.zeros(rows, np.int64), np.zeros(rows, np.uint64)
        for row, trunk in self._cache.trunks.items():
            if row < rows:
                if trunk not in self._fronts:
                    self._fronts[trunk] = _Front(trunk)
                starts[row], fronts[row] = len(trunk), self._fronts[trunk].address
        return starts, fronts

    def _matrix(self, product: Product) -> _Matrix:
        (outputs, inputs), panel = product.weight.shape, self._kernels.panel
        weight = product.weight.detach()
        panels = weight.new_zeros((-(-outputs // panel), inputs, panel))
        self._panels.append((panels, weight))
        bias = None if product.bias is None else self._keep(product.bias)
        return _Matrix(self._keep(panels), bias, outputs, inputs)

    def _keep(self, tensor: Tensor) -> int:
        """Return the address of a contiguous copy of a tensor, and keep it alive."""
        whole = tensor.detach().contiguous()
        assert whole.dtype == torch.float32, "the source reads float32"
        self._kept.append(whole)
        return whole.data_ptr()


def small_pass(decoder: Decoder, cache: SlotCache, kernels: CpuKernels | None) -> SmallPass | None:
    """Return a `SmallPass`, or None if the decoder is too large or the kernels cannot compute all of it."""
    if kernels is None or not isinstance(decoder.head, Product):
        return None
    products = [decoder.head]
    for layer in decoder.layers:
        products += [layer.query_key_value, layer.out, layer.gate_up, layer.down]
    is_plain = all(one.adapters is None and one.weight.dtype == torch.float32 for one in products)
    weights = sum(product.weight.numel() for product in products)
    if not is_plain or weights > MOST_WEIGHTS or decoder.heads.queries > _MOST_QUERIES * decoder.heads.keys:
        return None
    norms = [
        decoder.norm,
        *(norm for layer in decoder.layers for norm in (layer.attention_norm, layer.mlp_norm)),
    ]
    norms += [layer.head_norms.queries for layer in decoder.layers if layer.head_norms is not None]
    return SmallPass(decoder, cache, kernels) if len({norm.eps for norm in norms}) == 1 else None


def _address(numbers: NDArray[Any]) -> int:
    assert numbers.flags.c_contiguous, "the source reads contiguous arrays"
    return int(numbers.__array_interface__["data"][0])
