"""Layouts of packed segments for attention, and the choice among them.

    layout       where                     how
    OneRow       CUDA with bfloat16        joins all rows to one row without padding; variable-length kernel
    ByLength     CPU                       joins all rows; attention batches segments of similar length
    BlockMask    any device                keeps the rows, with a mask [L, L] for each; L^2 work
    PaddedRows   models that cannot pack   one segment per row; segments of similar length form a batch

In each layout a segment gets the same results as in a batch of its own.
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
# A branch of a prefix tree (`core.collate`) takes as much time as this many tokens (bench/shared_prefix.py).
SHARE_FROM = 16
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
# (q [L, H, D], k and v [L, H_kv, D], bounds, scale) -> [L, H, D]: causal, each query in its own segment.
Kernel = Callable[[Tensor, Tensor, Tensor, SegmentBounds, float], Tensor]


# The rows on the device, and keywords for the model's forward pass.
Arranged = tuple[Packed, dict[str, Any]]


class PackedAttention(Protocol):
    """Arranges the tokens of a packed batch as one implementation of attention needs them."""

    @property
    def implementation(self) -> str:
        """The name under which transformers knows the attention function (`attn_implementation`)."""

    @property
    def takes_tries(self) -> bool:
        """Whether rows may be prefix trees, which store shared prefixes once (`core.collate`)."""

    rows_are_joined: ClassVar[bool]
    """Whether `arranged` joins all rows without padding, so that a greater row width costs no time."""

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        """Return the arranged rows on `device`, and keyword arguments for the model's forward pass.

        A layout that joins the rows passes the attention function as `turnwise_attend`. It may also pass
        `turnwise_attend_read`, which computes attention only for the tokens whose hidden states are read
        (`learner.packed_decoder`), and `turnwise_reads`, which lists these tokens (`reads_once`). `dtype` is
        the dtype of the queries.
        """


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Keeps the rows; an additive mask hides the other segments of the row from each token (`block_mask`)."""

    implementation: str = "sdpa"
    takes_tries: ClassVar[bool] = True
    rows_are_joined: ClassVar[bool] = False

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        mask_B1LL = block_mask(packed.position_ids_BL).to(device)
        packed = to_device(packed, device)
        # A float mask, because torch would convert a boolean mask in every layer, and keep all copies.
        added_B1LL = torch.zeros_like(mask_B1LL, dtype=dtype).masked_fill_(~mask_B1LL, float("-inf"))
        return packed, {"attention_mask": added_B1LL}


@dataclass(frozen=True, slots=True)
class OneRow:
    """Joins all tokens to one row, for kernels with segments of variable length.

    `kernel` computes attention within segments. If the row contains prefix trees, `joined` computes the
    attention instead, level by level (`learner.joined`).
    """

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
    """Move a joined row to the device; return it with its keywords (see `PackedAttention.arranged`)."""
    return to_device(row, device), {
        "attention_mask": None,
        "turnwise_attend": attend,
        "turnwise_attend_read": attend_read,
        "turnwise_reads": to_device(reads, device),
    }


def attend_by_path(kernels: CpuKernels, depths: Depths) -> Attend:
    """Return a function that computes float32 attention over one row of prefix trees by CPU kernels.

    `depths` says for which tokens attention is computed. The kernels walk through the row, and
    store the keys on the path from the root to the current token (`models.cpu_kernels`), so they need neither
    a mask nor padding. Keys and values may have fewer heads than queries; their gradients are then summed in
    float64.
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
    """Joins all tokens to one row on a CPU.

    In float32, `kernels` compute attention (`attend_by_path`). If `kernels` is None, or for another dtype,
    `learner.joined` computes it for rows with prefix trees, and `learner.by_length` for all other rows.
    """

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
    """Return the positions of `row` that predict sampled tokens, each once, in ascending order.

    The second tensor, [N], contains for each sampled token the index of its position in the first tensor.
    """
    read_N, which_N = torch.unique(row.predict_position_N, return_inverse=True)
    return read_N, which_N


# Keyword argument that passes the result of `padded_groups` to a forward pass by the model's own layers.
GROUPS = "turnwise_groups"
Groups = tuple[Sequence[PaddedGroup], Tensor]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """Gives each segment a row of its own, padded at its end, for models that cannot pack segments.

    The model makes one forward pass for each group of segments of similar length. Any model with causal
    layers is supported: the padding follows the segment, so it needs no mask.
    """

    implementation: str
    """The model's own `attn_implementation` in transformers."""
    why: str
    """The reason why this model cannot pack several segments in a row."""
    ranks: Ranks = ALONE
    """The ranks of the learner. All ranks must make the same number of passes, because each pass gathers
    weights from all of them. A rank with fewer groups therefore makes additional passes over one token."""
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
        """Count the tokens that the forward passes compute for `packed`, including padding."""
        return len(group_by_length(one_row(packed)[1]).token_P)


def attention_for(placement: Placement, *, head_dim: int) -> PackedAttention:
    """Choose a device's layout: ByLength on a CPU, OneRow if its kernel can run, otherwise BlockMask."""
    if placement.device.type == "cpu":
        return ByLength(kernels_for(placement.device, in_float32=placement.low is None, head_dim=head_dim))
    if why_masked(placement, head_dim=head_dim) is not None:
        return BlockMask()
    return OneRow(varlen_kernel, Flash() if flash_is_here() else None)


def why_masked(placement: Placement, *, head_dim: int) -> str | None:
    """Return why a GPU must use BlockMask, as text for the user; None if the kernel of OneRow can run."""
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
    """Return whether torch's `varlen_attn` supports causal windows and grouped heads, as in torch 2.11."""
    return "window_size" in _varlen_parameters()


@cache
def _varlen_parameters() -> Set[str]:
    """Return the parameter names of torch's `varlen_attn`; empty if this torch does not have the function."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return inspect.signature(varlen_attn).parameters.keys()


def varlen_kernel(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
    """Compute causal attention within segments, [L, H, D] in bfloat16, by torch's FlashAttention.

    cuDNN is not used: torch 2.11 passes the head dimension to cuDNN's backward pass, where the length of the
    longest segment is expected, so cuDNN writes beyond its buffers (pytorch/pytorch#186142).
    """
    from torch.nn.attention.varlen import varlen_attn

    # Under autocast, norms and rotations return float32, and autocast does not cast inputs of this kernel.
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_LHD, k_LHD, v_LHD))
    # Before torch 2.13 there is no `enable_gqa`: torch infers grouped heads from the shapes.
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
    """Compute the attention of one layer for transformers, from [B, H, L, D] to [B, L, H, D].

    If the model was called with the keyword `turnwise_attend`, that function computes the attention. Without
    it, each row must be one sequence, padded only at its end, because transformers makes no mask for an
    attention function that it does not know.
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
