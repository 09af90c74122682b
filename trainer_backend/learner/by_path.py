"""Attention over one row of tries by the kernels of a CPU, in float32, with gradients.

A token sees what lies above it, which the kernels keep by depth (`models.cpu_kernels`): no mask, no padding,
no parts to join. What a beginning's keys and values get from all tokens below them is summed in float64.
"""

from typing import Any

import torch
from torch import Tensor

from trainer_backend.learner.by_length import Attend
from trainer_backend.models.cpu_kernels import CpuKernels, Depths
from trainer_backend.models.part_attention import widened


def attend_by_path(kernels: CpuKernels, depths: Depths) -> Attend:
    """Attention of the queries of `depths`; keys and values, of all tokens, may have fewer heads."""

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
