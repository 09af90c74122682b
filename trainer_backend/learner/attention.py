"""How attention keeps packed segments apart: which way a placement takes, and both ways.

    BlockMask    a mask [L, L] a row, for torch's scaled_dot_product_attention: any device, L^2 work
    OneRow       all rows end to end without padding, for a kernel of variable length: CUDA with bfloat16

Both give what each segment alone gives; tests hold them to it.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface

from trainer_backend.core.collate import Packed, block_mask
from trainer_backend.core.one_row import SegmentBounds, one_row
from trainer_backend.errors import ModelFolderError
from trainer_backend.learner.device import Placement

# How transformers knows our attention function.
ONE_ROW = "turnwise_one_row"
_NOT_COMPUTED = ("softcap", "s_aux", "position_bias")
# (q [L, H, D], k and v [L, H_kv, D], bounds, scale) -> [L, H, D]: causal, each query in its own segment.
Kernel = Callable[[Tensor, Tensor, Tensor, SegmentBounds, float], Tensor]


class PackedAttention(Protocol):
    """How a packed batch is laid out for the model, and what the model is told beside it."""

    @property
    def implementation(self) -> str:
        """The name under which transformers knows the attention function."""

    def arranged(
        self, packed: Packed, device: torch.device, dtype: torch.dtype
    ) -> tuple[Packed, dict[str, Any]]:
        """The rows that the model is given, on the device, and the keywords beside them.

        `dtype` is that of the queries.
        """


@dataclass(frozen=True, slots=True)
class BlockMask:
    """Rows as they are, under `core.collate.block_mask`."""

    implementation: str = "sdpa"

    def arranged(
        self, packed: Packed, device: torch.device, dtype: torch.dtype
    ) -> tuple[Packed, dict[str, Any]]:
        packed = packed.to(device)
        mask_B1LL = block_mask(packed.segment_ids_BL)
        # As numbers to add: torch would make these of the booleans in every layer, and keep them all.
        added_B1LL = torch.zeros_like(mask_B1LL, dtype=dtype).masked_fill_(~mask_B1LL, float("-inf"))
        return packed, {"attention_mask": added_B1LL}


@dataclass(frozen=True, slots=True)
class OneRow:
    """One row of all tokens; `kernel` is told where its segments lie."""

    kernel: Kernel
    implementation: str = ONE_ROW

    def arranged(
        self, packed: Packed, device: torch.device, dtype: torch.dtype
    ) -> tuple[Packed, dict[str, Any]]:
        row, bounds = one_row(packed)
        told = {"turnwise_kernel": self.kernel, "turnwise_bounds": bounds.to(device)}
        return row.to(device), {"attention_mask": None, **told}


def attention_for(placement: Placement) -> PackedAttention:
    """OneRow where its kernel runs, BlockMask elsewhere; a run says at its start which."""
    if placement.device.type == "cuda" and placement.low is not None and varlen_is_here():
        return OneRow(varlen_kernel)
    return BlockMask()


def varlen_is_here() -> bool:
    """Whether this torch has `varlen_attn` with causal windows and grouped heads (2.13 has)."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return False
    return {"window_size", "enable_gqa"} <= inspect.signature(varlen_attn).parameters.keys()


def varlen_kernel(q_LHD: Tensor, k_LHD: Tensor, v_LHD: Tensor, bounds: SegmentBounds, scale: float) -> Tensor:
    """A `Kernel`: torch's FlashAttention over the segments, in bfloat16."""
    from torch.nn.attention.varlen import varlen_attn

    # Under autocast norms and rotations leave float32 behind, and autocast does not know this kernel.
    q, k, v = (tensor.to(torch.bfloat16) for tensor in (q_LHD, k_LHD, v_LHD))
    attended = varlen_attn(
        q, k, v, bounds.starts_S, bounds.starts_S, bounds.longest, bounds.longest,
        scale=scale, window_size=(-1, 0), enable_gqa=q.shape[1] != k.shape[1],
    )  # fmt: skip
    assert isinstance(attended, Tensor), "a pair comes back only to who asks for more"
    return attended


def _one_row_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    turnwise_kernel: Kernel,
    turnwise_bounds: SegmentBounds,
    **others: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer: [1, H, L, D] in, [1, L, H, D] out.

    Raises:
        ModelFolderError: the layer asks for what the kernel does not compute. (Windows shorter than a
            sequence, `learner.support` has refused; longer ones say nothing.)
    """
    asked = [name for name in _NOT_COMPUTED if others.get(name) is not None]
    if asked:
        raise ModelFolderError(
            f"its attention has {asked[0]}, which packed rows leave out", where="model.path"
        )
    q_LHD, k_LHD, v_LHD = (tensor[0].transpose(0, 1) for tensor in (query, key, value))
    return turnwise_kernel(q_LHD, k_LHD, v_LHD, turnwise_bounds, scaling)[None], None


AttentionInterface.register(ONE_ROW, _one_row_attention)
