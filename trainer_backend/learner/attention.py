"""Layouts of packed segments for attention, and the choice among them.

    OneRow       one row without padding, for a variable-length kernel: CUDA with bfloat16
    ByLength     one row; within attention, segments of similar length are batched: a CPU
    BlockMask    a mask [L, L] per row, for torch's scaled_dot_product_attention: any device, L^2 work
    PaddedRows   one segment per row, batched by length: models that cannot pack rows, any device

All give each segment the results that it has alone, as tests check.
"""

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from trainer_backend.core.collate import Packed, block_mask, to_device
from trainer_backend.errors import ModelFolderError
from trainer_backend.learner.by_length import (
    Attend,
    PaddedGroup,
    SegmentBounds,
    attend_by_length,
    attend_reads,
    causal_attention,
    group_by_length,
    one_row,
    padded_groups,
    plan_reads,
)
from trainer_backend.learner.device import Placement
from trainer_backend.learner.joined import (
    Flash,
    Plan,
    Runs,
    attend,
    attend_levels,
    flash_is_here,
    list_levels,
)
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.models.cpu_kernels import CpuKernels, Depths, kernels_for
from trainer_backend.models.part_attention import why_no_parts, widened

# Name of our attention function in transformers.
ONE_ROW = "turnwise_one_row"
# Head dimensions of FlashAttention: multiples of 8 up to this.
_WIDEST_HEAD = 256
# A branch of a trie (`core.collate`) costs about as much as this many tokens (bench/shared_prefix.py).
SHARE_FROM = 16
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
# (q [L, H, D], k and v [L, H_kv, D], bounds, scale) -> [L, H, D]: causal, each query in its own segment.
Kernel = Callable[[Tensor, Tensor, Tensor, SegmentBounds, float], Tensor]


# The rows on the device, and keywords for the model's forward pass.
Arranged = tuple[Packed, dict[str, Any]]


class PackedAttention(Protocol):
    """Lays a packed batch out for the model's attention."""

    @property
    def implementation(self) -> str:
        """Return the name of the attention function in transformers."""

    @property
    def takes_tries(self) -> bool:
        """Return whether rows may be tries, which store shared prefixes once (`core.collate`)."""

    rows_are_joined: ClassVar[bool]
    """Whether rows are concatenated without padding, so that wide rows cost no more."""

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        """Return the rows on the device, and keywords for the forward pass.

        For one row the keywords are `turnwise_attend` and, if it is cheaper for the tokens that are read,
        `turnwise_attend_read` (`learner.packed_decoder`); for tries also `turnwise_reads` (`reads_once`).
        `dtype` is that of the queries.
        """


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Unchanged rows, with `core.collate.block_mask`."""

    implementation: str = "sdpa"
    takes_tries: ClassVar[bool] = True
    rows_are_joined: ClassVar[bool] = False

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        mask_B1LL = block_mask(packed.position_ids_BL).to(device)
        packed = to_device(packed, device)
        # As float: torch would convert the booleans in every layer, and keep all results.
        added_B1LL = torch.zeros_like(mask_B1LL, dtype=dtype).masked_fill_(~mask_B1LL, float("-inf"))
        return packed, {"attention_mask": added_B1LL}


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row of all tokens. `kernel` attends within segments; for tries `joined` attends level by level."""

    kernel: Kernel
    joined: Flash | None = None
    implementation: str = ONE_ROW
    rows_are_joined: ClassVar[bool] = True

    @property
    def takes_tries(self) -> bool:
        return self.joined is not None

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        runs = Runs.of(row.position_ids_BL[0].numpy())
        if self.joined is not None and runs.shared:
            levels = to_device(tuple(list_levels(runs)), device)
            return _keywords(row, device, partial(attend_levels, levels, self.joined), reads=reads_once(row))
        bounds = to_device(bounds, device)

        def attend(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
            return self.kernel(q_LHD, k_LHD, v_LHD, bounds, scale)

        return _keywords(row, device, attend)


ReadOnce = tuple[Tensor, Tensor]


def _keywords(
    row: Packed,
    device: torch.device,
    attend: Attend,
    attend_read: Attend | None = None,
    reads: ReadOnce | None = None,
) -> Arranged:
    """Return one row on the device, and the keywords of its attention (`PackedAttention.arranged`)."""
    return to_device(row, device), {
        "attention_mask": None,
        "turnwise_attend": attend,
        "turnwise_attend_read": attend_read,
        "turnwise_reads": to_device(reads, device),
    }


def attend_by_path(kernels: CpuKernels, depths: Depths) -> Attend:
    """Return float32 attention by CPU kernels over one row of tries, for the queries of `depths`.

    The kernels keep the keys above a token by depth (`models.cpu_kernels`). So they need no mask, no padding
    and no joining of parts. Keys and values may have fewer heads, whose gradients are then summed in float64.
    """

    def attend(q_NHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
        size, wide = v_LHD.shape[-1], widened(v_LHD, q_NHD.shape[-1])
        out: Tensor = _ByPath.apply(kernels, depths, q_NHD, k_LHD, wide, scale)  # type: ignore[no-untyped-call]
        return out[..., :size]

    return attend


class _ByPath(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, kernels: CpuKernels, depths: Depths, q: Tensor, k: Tensor, v: Tensor, scale: float
    ) -> Tensor:
        out, lse = kernels.path_forward(depths, q, k, v, scale)
        ctx.kernels, ctx.depths, ctx.scale = kernels, depths, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        dq, dk, dv = ctx.kernels.path_backward(ctx.depths, gradients[0], *ctx.saved_tensors, ctx.scale)
        return None, None, dq, dk, dv, None


@dataclass(frozen=True, slots=True)
class ByLength:
    """One row of all tokens on a CPU. In float32 `kernels` compute attention (`attend_by_path`). Without
    them, or in another dtype, `learner.by_length` does, or for tries `learner.joined`."""

    kernels: CpuKernels | None = None
    implementation: str = ONE_ROW
    rows_are_joined: ClassVar[bool] = True

    @property
    def takes_tries(self) -> bool:
        return self.kernels is not None or why_no_parts() is None

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        position_L = row.position_ids_BL[0]
        if self.kernels is not None and dtype == torch.float32:
            reads = reads_once(row)
            of_all, of_reads = Depths.of(position_L), Depths.of(position_L, reads[0])
            ways = attend_by_path(self.kernels, of_all), attend_by_path(self.kernels, of_reads)
            return _keywords(row, device, *ways, reads)
        runs = Runs.of(position_L.numpy())
        if runs.shared:
            reads = reads_once(row)
            plan = Plan.of_some(runs, reads[0])
            of_some = None if plan is None else partial(attend, plan)
            return _keywords(row, device, partial(attend, Plan.of_all(runs)), of_some, reads)
        groups = to_device(group_by_length(bounds), device)
        some = to_device(plan_reads(bounds, row.predict_position_N, dtype), device)
        of_some = None if some is None else partial(attend_reads, groups, some)
        return _keywords(row, device, partial(attend_by_length, groups), of_some)


def reads_once(row: Packed) -> ReadOnce:
    """Return the distinct positions that predict a row's sampled tokens, and each token's index in them."""
    read_N, which_N = torch.unique(row.predict_position_N, return_inverse=True)
    return read_N, which_N


# Keyword of a forward pass by the model's own layers, with the result of `padded_groups`.
GROUPS = "turnwise_groups"
Groups = tuple[Sequence[PaddedGroup], Tensor]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """One segment per row, padded at its end; one pass per group of similar lengths. For all causal layers.

    No token sees a later one, so padding needs no mask.
    """

    implementation: str
    """Name of the model's own attention."""
    why: str
    """The reason why rows are not packed."""
    ranks: Ranks = ALONE
    """The ranks make equally many passes, because each pass gathers weights from all of them."""
    takes_tries: ClassVar[bool] = False
    rows_are_joined: ClassVar[bool] = True

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        groups, order_N = padded_groups(row, bounds)
        missing = max(self.ranks.of_every_rank(len(groups))) - len(groups)
        ids_BL = row.token_ids_BL[:, :1]
        groups += [PaddedGroup(ids_BL, torch.zeros_like(ids_BL, dtype=torch.bool), order_N[:0])] * missing
        return to_device(row, device), {GROUPS: to_device((tuple(groups), order_N), device)}

    @staticmethod
    def places(packed: Packed) -> int:
        """Count the tokens that the passes compute, padding included."""
        return len(group_by_length(one_row(packed)[1]).token_P)


def attention_for(placement: Placement, *, head_dim: int) -> PackedAttention:
    """Choose ByLength on a CPU, OneRow if its kernel runs, otherwise BlockMask."""
    if placement.device.type == "cpu":
        return ByLength(kernels_for(placement.device, in_float32=placement.low is None, head_dim=head_dim))
    if why_masked(placement, head_dim=head_dim) is not None:
        return BlockMask()
    return OneRow(varlen_kernel, Flash() if flash_is_here() else None)


def why_masked(placement: Placement, *, head_dim: int) -> str | None:
    """Return why attention on a device other than a CPU is masked; None if there is a kernel for one row."""
    if placement.device.type != "cuda":
        return f"{placement.device.type} has no kernel for rows of several segments"
    if placement.low is None:
        return "the kernel for rows of several segments needs bfloat16, which GPUs before Ampere lack"
    if head_dim % 8 or head_dim > _WIDEST_HEAD:
        return f"its kernel takes head dimensions of 8, 16, ... {_WIDEST_HEAD}; this model's is {head_dim}"
    if not varlen_is_here():
        return f"torch {torch.__version__} has no varlen_attn with windows and grouped heads; 2.11 has"
    return None


def varlen_is_here() -> bool:
    """Return whether this torch has `varlen_attn` with causal windows and grouped heads (2.11 has)."""
    return "window_size" in _varlen_parameters()


@cache
def _varlen_parameters() -> Set[str]:
    """Return the names of `varlen_attn`'s parameters; empty if torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return inspect.signature(varlen_attn).parameters.keys()


def varlen_kernel(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
    """Attend by torch's FlashAttention over the segments, in bfloat16 (a `Kernel`).

    Not by cuDNN: torch 2.11 passes the head dimension to its backward pass as the longest segment, and it
    writes beyond its buffers (pytorch/pytorch#186142).
    """
    from torch.nn.attention.varlen import varlen_attn

    # Under autocast, torch's norms and rotations return float32; autocast does not cast for this kernel.
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_LHD, k_LHD, v_LHD))
    # Before torch 2.13 grouped heads follow from the shapes.
    grouped = {"enable_gqa": q.shape[1] != k.shape[1]} if "enable_gqa" in _varlen_parameters() else {}
    kernel: Callable[..., object] = varlen_attn
    attended = kernel(
        q, k, v, bounds.starts_S, bounds.starts_S, bounds.longest, bounds.longest,
        scale=scale, window_size=(-1, 0), **grouped,
    )  # fmt: skip
    assert isinstance(attended, Tensor), "a pair is returned only on request"
    return attended


def _one_row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    turnwise_attend: Attend | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attend in a layer of transformers: [B, H, L, D] in, [B, L, H, D] out.

    Without `turnwise_attend` (any other call of the model), each row is one sequence, padded only at its end:
    transformers makes no mask for an unknown attention function.
    """
    unsupported = next((name for name in _NOT_COMPUTED if others.get(name) is not None), None)
    if unsupported:
        raise ModelFolderError(
            f"its attention has {unsupported}, which packed rows do not support", where="model.path"
        )
    if turnwise_attend is None:
        return causal_attention(query, key, value, scale=scaling).transpose(1, 2), None
    q_LHD, k_LHD, v_LHD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return turnwise_attend(q_LHD, k_LHD, v_LHD, scaling)[None], None


AttentionInterface.register(ONE_ROW, _one_row_attention)
