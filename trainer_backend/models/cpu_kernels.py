"""CPU kernels for the operations of a decoder, in float32, built by the machine's compiler.

    product     x w' for few tokens; reads the weight in place, without a repacked copy
    rms_norm    x / sqrt(mean(x^2) + eps) * weight                                  rows [T, W]
    rotary      optional norm of each head, and rotation of its halves by position  heads [T, S, D]
    swiglu      silu(gate) * up                                                     rows [T, M]
    store       writes the keys and values of tokens to a cache with one row per sequence
    attend      attention of each token over its sequence's row of the cache, without padding
    path_*      causal attention in packed prefix trees (`Depths`), and its gradients
    small_pass  a whole forward pass of a small decoder, with sampling (`inference.small_pass`)

In a model with fewer than a million parameters, the overhead of torch's operators takes more time than the
matrix products. In larger models, torch's products of few tokens take up to 1.7 times as long as `product`.
The kernels add in another order than torch; their results agree with torch's to 1e-6.

The source is `cpu_kernels.c`, and `cpu_pass.c` for `small_pass`. It is compiled within a few seconds, into
`~/.cache/turnwise`. The threads are those of torch's OpenMP pool. Sources: see `models.kernels`.
"""

import ctypes
import os
import shutil
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

import structlog
import torch
from torch import Tensor

from trainer_backend.models.cpu_build import built_library

log = structlog.get_logger(__name__)

# The largest head dimension, as in the C source.
_WIDEST_HEAD = 256
# With fewer inputs, `product` loses more time in the final sum over vector lanes than it saves.
_LEAST_INPUTS = 320
# The most tokens for which `product` was faster than torch (MKL), by vector lanes (16: AVX-512, 8: AVX2).
_MOST_TOKENS = {16: 128, 8: 32}
# Outputs that `product` computes at a time.
_COLUMNS = 8


# Argument types of the functions: p a pointer, i a 64-bit and n a 32-bit integer, f a float.
_KINDS: Any = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "n": ctypes.c_int, "f": ctypes.c_float}
_ARGUMENTS = {
    "product": "pipiiipinn",
    "rms_norm": "pppfiippn",
    "rms_norm_backward": "ppppfiippn",
    "rotary": "piiiiippfppppn",
    "rotary_backward": "piiiipfppppipn",
    "swiglu": "pipiiipn",
    "swiglu_backward": "pipipiipn",
    "store": "pipiiiiiipppp",
    "attend": "pippiiiiiippfppn",
    "path_forward": "pppnn",
    "path_backward": "ppnn",
    "small_pass": "pppppppn",
}


class _Row(ctypes.Structure):
    """`struct row` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("q", "k", "v")),
        *(
            (name, ctypes.c_int64)
            for name in ("q_stride", "k_stride", "v_stride", "tokens", "heads", "kv_heads", "size", "longest")
        ),
        *((name, ctypes.c_void_p) for name in ("position", "query")),
        ("scale", ctypes.c_float),
    ]


class _Gradients(ctypes.Structure):
    """`struct gradients` of the C source."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("grad", "out", "lse")),
        ("grad_stride", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("d_q", "d_k", "d_v")),
    ]


@dataclass(frozen=True, slots=True)
class Depths:
    """The depths of tokens in packed prefix trees. Each token attends to itself and its ancestors."""

    position_L: Tensor
    """int64 depth of each token in its tree; tokens are in depth-first order, without padding."""
    query_L: Tensor | None
    """int64 index of each token's query, -1 for a token without query; None: token i has query i."""
    longest: int

    @classmethod
    def of(cls, position_L: Tensor, query_N: Tensor | None = None) -> Self:
        """Make `Depths`; `query_N` lists the indices of the tokens with a query. None means all tokens."""
        query_L = None
        if query_N is not None:
            query_L = torch.full_like(position_L, -1)
            query_L[query_N] = torch.arange(len(query_N))
        return cls(position_L.contiguous(), query_L, 1 + int(position_L.max()))

    def row(self, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> _Row:
        tensors = q_NHD, k_LHD, v_LHD
        query = _address64(self.query_L)
        return _Row(
            *map(_address, tensors), *(tensor.stride(0) for tensor in tensors),
            len(k_LHD), q_NHD.shape[1], *k_LHD.shape[1:], self.longest, _address64(self.position_L), query,
            scale,
        )  # fmt: skip


class CpuKernels:
    """The compiled kernels, for float32 tensors. See `models.kernels` for methods without a docstring."""

    def __init__(self, path: Path) -> None:
        library = ctypes.CDLL(str(path), mode=os.RTLD_NOW)
        for name, kinds in _ARGUMENTS.items():
            function = getattr(library, name)
            function.argtypes, function.restype = [_KINDS[kind] for kind in kinds], None
        for name in ("path_forward", "path_backward", "small_pass"):
            getattr(library, name).restype = ctypes.c_int
        for name in ("vector_lanes", "panel_outputs"):
            getattr(library, name).restype = ctypes.c_int64
        self._lanes: int = library.vector_lanes()
        self.panel: int = library.panel_outputs()  # outputs per panel of a packed `struct matrix`
        self._library: Any = library

    def multiplies(self, tokens: int, weight_OI: Tensor) -> bool:
        """Return whether `product` supports this weight and number of tokens, and is faster than torch."""
        outputs, inputs = weight_OI.shape
        is_wide = inputs >= _LEAST_INPUTS and inputs % self._lanes == 0 and outputs >= _COLUMNS
        return is_wide and 0 < tokens <= _MOST_TOKENS.get(self._lanes, 0) and weight_OI.is_contiguous()

    def product(self, input_TI: Tensor, weight_OI: Tensor) -> Tensor:
        """Return input times transposed weight, [T, O]. Call it only if `multiplies` returns true.

        A token's result is the same to the last bit, whatever other tokens are in the call.
        """
        out_TO = input_TI.new_empty((len(input_TI), len(weight_OI)))
        self._multiply(input_TI, weight_OI, out_TO, adds=False)
        return out_TO

    def add_product(self, input_TI: Tensor, weight_OI: Tensor, *, to_TO: Tensor) -> None:
        """Add input times transposed weight to `to_TO`. Call it only if `multiplies` returns true."""
        if len(weight_OI) % _COLUMNS:
            to_TO.add_(self.product(input_TI, weight_OI))
        else:
            self._multiply(input_TI, weight_OI, to_TO, adds=True)

    def _multiply(self, input_TI: Tensor, weight_OI: Tensor, out_TO: Tensor, *, adds: bool) -> None:
        input_TI = input_TI if input_TI.stride(1) == 1 else input_TI.contiguous()
        self._library.product(
            _address(input_TI), input_TI.stride(0), _address(weight_OI), len(input_TI), *weight_OI.shape,
            _address(out_TO), out_TO.stride(0), adds, torch.get_num_threads(),
        )  # fmt: skip

    def rms_norm(
        self, states_TW: Tensor, added_TW: Tensor | None, weight_W: Tensor, eps: float, *, sums_TW: Tensor,
        out: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        out_TW = torch.empty_like(states_TW)
        self._library.rms_norm(
            _address(states_TW), _address(added_TW), _address(weight_W), eps, *states_TW.shape,
            _address(sums_TW), _address(out_TW), torch.get_num_threads(),
        )  # fmt: skip
        return out_TW

    def rms_norm_backward(
        self, sums_TW: Tensor, weight_W: Tensor, by_out_TW: Tensor, by_sums_TW: Tensor | None, eps: float, *,
        added: torch.dtype | None, weighs: bool,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
        by_states_TW, parts_PW = torch.empty_like(sums_TW), _sums_for(sums_TW, sums_TW.shape[1])
        self._library.rms_norm_backward(
            _address(sums_TW), _address(weight_W), _address(by_out_TW), _address(by_sums_TW), eps,
            *sums_TW.shape, _address(by_states_TW), _address(parts_PW), torch.get_num_threads(),
        )  # fmt: skip
        by_added_TW = None if added is None else by_states_TW
        return by_states_TW, by_added_TW, parts_PW.sum(0) if weighs else None

    def rotary(
        self, heads_TSD: Tensor, weights: tuple[Tensor, Tensor] | None, cos_LD: Tensor, sin_LD: Tensor,
        positions_T: Tensor | None, *, queries: int, eps: float, out: torch.dtype = torch.float32,
    ) -> Tensor:  # fmt: skip
        heads_TSD = _by_token(heads_TSD)
        tokens, heads, size = heads_TSD.shape
        out_TSD = heads_TSD.new_empty((tokens, heads, size))
        by_query, by_key = (None, None) if weights is None else map(_address, weights)
        self._library.rotary(
            _address(heads_TSD), heads_TSD.stride(0), tokens, heads, queries, size, by_query, by_key, eps,
            _address(cos_LD), _address(sin_LD), _address64(positions_T), _address(out_TSD),
            torch.get_num_threads(),
        )  # fmt: skip
        return out_TSD

    def rotary_backward(
        self, heads_TSD: Tensor, weight_D: Tensor | None, cos_TD: Tensor, sin_TD: Tensor, by_out_TSD: Tensor,
        *, by_heads_TSD: Tensor, eps: float, weighs: bool,
    ) -> Tensor | None:  # fmt: skip
        heads_TSD = _by_token(heads_TSD)
        tokens, heads, size = heads_TSD.shape
        parts_PD = None if weight_D is None else _sums_for(heads_TSD, size)
        self._library.rotary_backward(
            _address(heads_TSD), heads_TSD.stride(0), tokens, heads, size, _address(weight_D), eps,
            _address(cos_TD), _address(sin_TD), _address(by_out_TSD), _address(by_heads_TSD),
            by_heads_TSD.stride(0), _address(parts_PD), torch.get_num_threads(),
        )  # fmt: skip
        return parts_PD.sum(0) if parts_PD is not None and weighs else None

    def swiglu(self, gate_TM: Tensor, up_TM: Tensor) -> Tensor:
        out_TM = gate_TM.new_empty(gate_TM.shape)
        self._library.swiglu(
            _address(gate_TM), gate_TM.stride(0), _address(up_TM), up_TM.stride(0), *gate_TM.shape,
            _address(out_TM), torch.get_num_threads(),
        )  # fmt: skip
        return out_TM

    def swiglu_backward(self, gate_TM: Tensor, up_TM: Tensor, by_out_TM: Tensor) -> Tensor:
        tokens, width = gate_TM.shape
        by_both_TM = by_out_TM.new_empty((tokens, 2 * width))
        self._library.swiglu_backward(
            _address(gate_TM), gate_TM.stride(0), _address(up_TM), up_TM.stride(0), _address(by_out_TM),
            tokens, width, _address(by_both_TM), torch.get_num_threads(),
        )  # fmt: skip
        return by_both_TM

    def store(
        self, k_TKD: Tensor, v_TKD: Tensor, cache: tuple[Tensor, Tensor], heads_TK: Tensor, columns_T: Tensor
    ) -> None:
        """Write keys and values of tokens to a cache [rows, heads, columns, D], with one sequence per row.

        `columns_T` contains the column of each token. `heads_TK` contains row * heads + head for each token
        and head, where row is the row of the token's sequence.
        """
        keys, values = cache
        tokens, heads, size = k_TKD.shape
        self._library.store(
            _address(k_TKD), k_TKD.stride(0), _address(v_TKD), v_TKD.stride(0), tokens, heads, size,
            keys.shape[2], values.shape[2], _address64(heads_TK), _address64(columns_T), _address(keys),
            _address(values),
        )  # fmt: skip

    def path_forward(
        self, depths: Depths, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float
    ) -> tuple[Tensor, Tensor]:
        """Return output [N, H, D] and log-sum-exp [N, H] of the queries. Keys must be as wide as values."""
        q, k, v = map(_by_token, (q_NHD, k_LHD, v_LHD))
        out_NHD, lse_NH = q.new_empty(q.shape), q.new_empty(q.shape[:2])
        row = depths.row(q, k, v, scale)
        threads = torch.get_num_threads()
        _refuse_shortage(
            self._library.path_forward(
                ctypes.byref(row), _address(out_NHD), _address(lse_NH), _parts(k, threads), threads
            )
        )
        return out_NHD, lse_NH

    def path_backward(
        self, depths: Depths, grad_NHD: Tensor, q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, out_NHD: Tensor,
        lse_NH: Tensor, scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """Return the gradients of `path_forward` with respect to queries, keys and values."""
        q, k, v, grad = map(_by_token, (q_NHD, k_LHD, v_LHD, grad_NHD))
        threads = torch.get_num_threads()
        parts = _parts(k, threads)
        dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q, k, v))
        row = depths.row(q, k, v, scale)
        gradients = _Gradients(
            _address(grad), _address(out_NHD), _address(lse_NH), grad.stride(0), _address(dq),
            _address(dk), _address(dv),
        )  # fmt: skip
        _refuse_shortage(
            self._library.path_backward(ctypes.byref(row), ctypes.byref(gradients), parts, threads)
        )
        return dq, dk, dv

    def attend(
        self, q_THD: Tensor, cache: tuple[Tensor, Tensor], heads_TK: Tensor, columns_T: Tensor, *,
        scale: float,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Return the attention output [T, H, D] and the log-sum-exp [T, H] of tokens over a cache.

        Each token attends to its row from the first column to its own column; see `store`.
        """
        keys, values = cache
        tokens, heads, size = q_THD.shape
        out_THD = q_THD.new_empty((tokens, heads, size))
        lse_TH = q_THD.new_empty((tokens, heads))
        self._library.attend(
            _address(q_THD), q_THD.stride(0), _address(keys), _address(values), tokens, heads,
            heads_TK.shape[1], size, keys.shape[2], values.shape[2], _address64(heads_TK),
            _address64(columns_T), scale, _address(out_THD), _address(lse_TH), torch.get_num_threads(),
        )  # fmt: skip
        return out_THD, lse_TH

    def small_pass(self, model: ctypes.Structure, tokens: ctypes.Structure, *places: int | None) -> None:
        """Run a forward pass of a small decoder; `inference.small_pass` fills the C structures."""
        threads = torch.get_num_threads()
        done = self._library.small_pass(ctypes.byref(model), ctypes.byref(tokens), *places, threads)
        _refuse_shortage(done, "the buffers of a small model's pass")


def _address(tensor: Tensor | None) -> int | None:
    """Return the address of a float32 tensor; TypeError for other dtypes, whose memory may be smaller."""
    if tensor is None:
        return None
    if tensor.dtype != torch.float32:
        raise TypeError(f"the CPU kernels take float32, not {tensor.dtype}")
    return tensor.data_ptr()


def _address64(tensor: Tensor | None) -> int | None:
    if tensor is not None and tensor.dtype != torch.int64:
        raise TypeError(f"the CPU kernels take positions as int64, not {tensor.dtype}")
    return None if tensor is None else tensor.data_ptr()


def _sums_for(tokens: Tensor, width: int) -> Tensor:
    """Return zeros for the partial sums of a weight's gradient; each partial sum is over 64 tokens."""
    return tokens.new_zeros((-(-len(tokens) // 64), width))


def _by_token(tokens: Tensor) -> Tensor:
    """Return a tensor whose numbers are contiguous within each token; tokens may have any stride."""
    is_so = tokens.stride(2) == 1 and tokens.stride(1) == tokens.shape[2]
    return tokens if is_so else tokens.contiguous()


def _parts(keys: Tensor, threads: int) -> int:
    """Return into how many parts to divide the tokens; 1 if the heads alone occupy all threads equally."""
    return 1 if keys.shape[1] % threads == 0 else threads


def _refuse_shortage(done: int, what: str = "attention's buffers") -> None:
    if not done:
        raise RuntimeError(f"out of memory while allocating {what}")


def kernels_for(device: torch.device, *, in_float32: bool, head_dim: int) -> CpuKernels | None:
    """Return the CPU kernels; None if they cannot be built, or do not support device, dtype or head size."""
    fits = device.type == "cpu" and in_float32 and head_dim <= _WIDEST_HEAD
    return cpu_kernels() if fits else None


@cache
def cpu_kernels() -> CpuKernels | None:
    """Return this machine's kernels; log a warning and return None if they cannot be compiled."""
    compiler = shutil.which(os.environ.get("CC") or "cc")
    reason = "there is no C compiler (cc, or what CC names)"
    if compiler is not None:
        # Some compilers have no OpenMP. Without it, each call runs on one thread.
        for openmp in (True, False):
            try:
                return CpuKernels(built_library(compiler, openmp=openmp))
            except (OSError, AttributeError, subprocess.SubprocessError) as error:
                reason = getattr(error, "stderr", None) or str(error)
    log.warning("cpu_kernels_not_built", reason=reason, cost="a sampled token takes up to twice the time")
    return None
