"""How attention keeps packed segments apart: which way a placement takes, and the ways.

    OneRow       all rows end to end without padding, for a kernel of variable length: CUDA with bfloat16
    ByLength     the same row; attention alone has segments of similar length side by side: a CPU
    BlockMask    a mask [L, L] a row, for torch's scaled_dot_product_attention: any device, L^2 work
    PaddedRows   a segment a row, by length: layers that no mask over positions computes, on any device

All give what each segment alone gives; tests hold them to it.
"""

import inspect
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from trainer_backend.core.collate import Packed, block_mask
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
    LevelKernel,
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

# How transformers knows our attention function.
ONE_ROW = "turnwise_one_row"
# Of FlashAttention, which takes multiples of 8 (OpenLLaMA's 100, say, is none).
_WIDEST_HEAD = 256
# A branch of a trie costs about as much as so many tokens (bench/shared_prefix.py).
SHARE_FROM = 16
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
# (q [L, H, D], k and v [L, H_kv, D], bounds, scale) -> [L, H, D]: causal, each query in its own segment.
Kernel = Callable[[Tensor, Tensor, Tensor, SegmentBounds, float], Tensor]


# The rows that the model is given, on the device, and the keywords that go with them.
Arranged = tuple[Packed, dict[str, Any]]


class PackedAttention(Protocol):
    """The layout of a packed batch for the model, and the keywords that go with it."""

    @property
    def implementation(self) -> str:
        """The name under which transformers knows the attention function."""

    @property
    def takes_tries(self) -> bool:
        """Whether it takes rows of tries (`core.collate`)."""

    rows_are_joined: ClassVar[bool]
    """Whether rows are laid end to end, so that the length of one costs nothing."""

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        """The rows on the device, and their keywords.

        Of one row they hold `turnwise_attend`, and where it is cheaper for the tokens that are read
        `turnwise_attend_read`: see `learner.packed_decoder`. Of tries these are `turnwise_reads`, each once.
        `dtype` is that of the queries.
        """


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Rows as they are, under `core.collate.block_mask`."""

    implementation: str = "sdpa"
    takes_tries: ClassVar[bool] = True
    rows_are_joined: ClassVar[bool] = False

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        mask_B1LL = block_mask(packed.position_ids_BL).to(device)
        packed = packed.to(device)
        # As numbers to add: torch would make these of the booleans in every layer, and keep them all.
        added_B1LL = torch.zeros_like(mask_B1LL, dtype=dtype).masked_fill_(~mask_B1LL, float("-inf"))
        return packed, {"attention_mask": added_B1LL}


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row of all tokens; `kernel` gets the places of its segments, `joined` the levels of its tries."""

    kernel: Kernel
    joined: LevelKernel | None = None
    implementation: str = ONE_ROW
    rows_are_joined: ClassVar[bool] = True

    @property
    def takes_tries(self) -> bool:
        return self.joined is not None

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        runs = Runs.of(row.position_ids_BL[0].numpy())
        if self.joined is not None and runs.shared:
            levels = [level.to(device) for level in list_levels(runs)]
            return row.to(device), {
                "attention_mask": None,
                "turnwise_attend": partial(attend_levels, levels, self.joined),
                "turnwise_reads": reads_once(row, device),
            }
        bounds = bounds.to(device)

        def attend(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, scale: float) -> Tensor:
            return self.kernel(q_LHD, k_LHD, v_LHD, bounds, scale)

        return row.to(device), {"attention_mask": None, "turnwise_attend": attend}


def attend_by_path(kernels: CpuKernels, depths: Depths) -> Attend:
    """Attention over one row of tries by the kernels of a CPU, in float32: of the queries of `depths`.

    A token sees what lies above it, which the kernels keep by depth (`models.cpu_kernels`): no mask, no
    padding, no parts to join. Keys and values, of all tokens, may have fewer heads; what a beginning's get
    from all tokens below them is summed in float64.
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
    """One row of all tokens, as `OneRow`: by `kernels` of a CPU (`attend_by_path`), or where they are not by
    `learner.by_length`, and of tries `learner.joined`."""

    kernels: CpuKernels | None = None
    implementation: str = ONE_ROW
    rows_are_joined: ClassVar[bool] = True

    @property
    def takes_tries(self) -> bool:
        return self.kernels is not None or why_no_parts() is None

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        if self.kernels is not None and dtype == torch.float32:
            reads = reads_once(row, device)
            position_L = row.position_ids_BL[0]
            return row.to(device), {
                "attention_mask": None,
                "turnwise_attend": attend_by_path(self.kernels, Depths.of(position_L)),
                "turnwise_attend_read": attend_by_path(self.kernels, Depths.of(position_L, reads[0])),
                "turnwise_reads": reads,
            }
        runs = Runs.of(row.position_ids_BL[0].numpy())
        if runs.shared:
            reads = reads_once(row, device)
            of_reads = Plan.of_some(runs, reads[0])
            return row.to(device), {
                "attention_mask": None,
                "turnwise_attend": partial(attend, Plan.of_all(runs)),
                "turnwise_attend_read": of_reads and partial(attend, of_reads),
                "turnwise_reads": reads,
            }
        groups = group_by_length(bounds).to(device)
        some = plan_reads(bounds, row.predict_position_N, dtype)
        return row.to(device), {
            "attention_mask": None,
            "turnwise_attend": partial(attend_by_length, groups),
            "turnwise_attend_read": some and partial(attend_reads, groups, some.to(device)),
        }


def reads_once(row: Packed, device: torch.device) -> tuple[Tensor, Tensor]:
    """Where a row's tokens are predicted, each place once and in order, and which one is each token's."""
    read_N, which_N = torch.unique(row.predict_position_N, return_inverse=True)
    return read_N.to(device), which_N.to(device)


# The keyword under which a model's own layers get their rows: groups, and the order of what these read
# (`by_length.padded_groups`).
GROUPS = "turnwise_groups"
Groups = tuple[Sequence[PaddedGroup], Tensor]


@dataclass(frozen=True, slots=True)
class PaddedRows:
    """A segment a row, padded at its end, a group of similar lengths a pass: any causal layers compute it.

    No token sees one behind it, so padding changes nothing before it, and there is no mask of it.

    implementation: of the model's own attention.
    why: the reason why rows are not packed, in words.
    ranks: that make equally many passes, since each gathers the weights of all.
    """

    implementation: str
    why: str
    ranks: Ranks = ALONE
    takes_tries: ClassVar[bool] = False
    rows_are_joined: ClassVar[bool] = True

    def arranged(self, packed: Packed, device: torch.device, dtype: torch.dtype) -> Arranged:
        row, bounds = one_row(packed)
        groups, order_N = padded_groups(row, bounds)
        missing = max(self.ranks.of_every_rank(len(groups))) - len(groups)
        ids_BL = row.token_ids_BL[:, :1]
        groups += [PaddedGroup(ids_BL, torch.zeros_like(ids_BL, dtype=torch.bool), order_N[:0])] * missing
        return row.to(device), {GROUPS: ([group.to(device) for group in groups], order_N.to(device))}

    @staticmethod
    def places(packed: Packed) -> int:
        """How many tokens the passes compute, those of the padding too."""
        return len(group_by_length(one_row(packed)[1]).token_P)


def attention_for(placement: Placement, *, head_dim: int) -> PackedAttention:
    """OneRow where its kernel runs, ByLength on a CPU, BlockMask elsewhere."""
    if placement.device.type == "cpu":
        return ByLength(kernels_for(placement.device, in_float32=placement.low is None, head_dim=head_dim))
    if why_masked(placement, head_dim=head_dim) is not None:
        return BlockMask()
    return OneRow(varlen_kernel, Flash() if flash_is_here() else None)


def why_masked(placement: Placement, *, head_dim: int) -> str | None:
    """Why a device other than a CPU attends under a mask; None where it has a kernel for one row."""
    if placement.device.type != "cuda":
        return f"{placement.device.type} has no kernel for rows of several segments"
    if placement.low is None:
        return "this GPU is older than Ampere, and the kernel for rows of several segments needs bfloat16"
    if head_dim % 8 or head_dim > _WIDEST_HEAD:
        return (
            f"its kernel takes heads of 8, 16, ... {_WIDEST_HEAD} numbers, and this model's have {head_dim}"
        )
    if not varlen_is_here():
        return f"torch {torch.__version__} has no varlen_attn with windows and grouped heads; 2.11 has"
    return None


def varlen_is_here() -> bool:
    """Whether this torch has `varlen_attn` with causal windows and grouped heads (2.11 has)."""
    return "window_size" in _varlen_parameters()


@cache
def _varlen_parameters() -> Set[str]:
    """Names of what `varlen_attn` takes; none where torch does not have it."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return set()
    return inspect.signature(varlen_attn).parameters.keys()


def varlen_kernel(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
    """A `Kernel`: torch's FlashAttention over the segments, in bfloat16.

    Not cuDNN's: torch 2.11 tells its backward pass the width of a head as the longest segment, and it writes
    beyond its buffers (pytorch/pytorch#186142).
    """
    from torch.nn.attention.varlen import varlen_attn

    # Norms and rotations of torch leave float32 behind under autocast, which does not know this kernel.
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_LHD, k_LHD, v_LHD))
    # Before torch 2.13 grouped heads are told by the shapes alone.
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
    """What transformers calls in every layer: [B, H, L, D] in, [B, L, H, D] out.

    A model that is called without `turnwise_attend`, as anyone may, has one sequence a row, padded at its end
    if at all: transformers makes no mask for an attention function that it does not know.
    """
    asked = [name for name in _NOT_COMPUTED if others.get(name) is not None]
    if asked:
        raise ModelFolderError(
            f"its attention has {asked[0]}, which packed rows leave out", where="model.path"
        )
    if turnwise_attend is None:
        return causal_attention(query, key, value, scale=scaling).transpose(1, 2), None
    q_LHD, k_LHD, v_LHD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return turnwise_attend(q_LHD, k_LHD, v_LHD, scaling)[None], None


AttentionInterface.register(ONE_ROW, _one_row_attention)
