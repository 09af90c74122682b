"""Norms, rotary embeddings, projections and gates of a decoder layer, with gradients: by torch or kernels.

All implementations round as `models.precision` describes. Triton's kernels (`models.kernels`) are for CUDA
with bfloat16: inputs and outputs of matrix products are bfloat16, hidden states are read only once, and less
is saved for the backward pass. The CPU kernels (`models.cpu_kernels`) are for float32.
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor

from trainer_backend.core.logprobs import Reading
from trainer_backend.inference.paged_attention import kernels_are_here
from trainer_backend.learner import kernel_operators
from trainer_backend.learner.device import Placement
from trainer_backend.learner.packed_decoder import Operators, heads_apart
from trainer_backend.models.cpu_kernels import kernels_for
from trainer_backend.models.kinds import read_head_dim


def rms_norm(norm: Any, states: Tensor) -> Tensor:
    """Apply the RMSNorm module `norm` over the last dimension of the states.

        x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    if states.dtype != torch.float32 or torch.is_autocast_enabled(states.device.type):
        # The module's own forward pass rounds exactly as the engine does.
        out: Tensor = norm(states)
        return out
    own: Tensor = _RmsNorm.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return own


class _RmsNorm(torch.autograd.Function):
    """RMSNorm of float32 states that saves only its input x, the weight, and r = 1 / RMS(x) per row.

    With the gradient g of the output, and x^ = r * x, the gradients are

    dx = r * (g * weight - x^ * mean(g * weight * x^))        dweight = sum(g * x^)
    """

    @staticmethod
    def forward(ctx: Any, states: Tensor, weight_D: Tensor, epsilon: float) -> Tensor:
        squares = torch.linalg.vector_norm(states, dim=-1, keepdim=True).square_()
        inverse = squares.div_(states.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(states, weight_D, inverse)
        scaled: Tensor = states * inverse
        return scaled.mul_(weight_D)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (gradient,), (states, weight_D, inverse) = gradients, ctx.saved_tensors
        scaled = states * inverse
        products = gradient * scaled
        # The weight is copied, because its alignment in memory affects the last bits of the product, and a
        # loaded checkpoint may align it differently.
        means = (products @ weight_D.clone()).unsqueeze_(-1).div_(states.shape[-1])
        d_weight_D = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        d_states = (gradient * weight_D).addcmul_(scaled, means, value=-1.0).mul_(inverse)
        return d_states, d_weight_D, None


def rotary(heads_LHD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """Apply rotary position embeddings to heads [L, H, D], in the dtype of `cos_LD`.

        x * cos + (-x2, x1) * sin        x1 and x2 are the halves of x, as in transformers

    Source: Su et al., RoFormer, arXiv:2104.09864.
    """
    out_LHD: Tensor = _Rotary.apply(heads_LHD, cos_LD[:, None], sin_LD[:, None])  # type: ignore[no-untyped-call]
    return out_LHD


class _Rotary(torch.autograd.Function):
    """Applies rotary embeddings. Saves only cos and sin: the gradient is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, heads_LHD: Tensor, cos_L1D: Tensor, sin_L1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_L1D, sin_L1D)
        ctx.dtype = heads_LHD.dtype
        return _rotate(heads_LHD.to(cos_L1D.dtype), cos_L1D, sin_L1D, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_L1D, sin_L1D = ctx.saved_tensors
        return _rotate(gradients[0], cos_L1D, sin_L1D, -1.0).to(ctx.dtype), None, None


def _rotate(heads_LHD: Tensor, cos_L1D: Tensor, sin_L1D: Tensor, sign: float) -> Tensor:
    half = heads_LHD.shape[-1] // 2
    out_LHD = heads_LHD * cos_L1D
    out_LHD[..., :half].addcmul_(heads_LHD[..., half:], sin_L1D[..., :half], value=-sign)
    out_LHD[..., half:].addcmul_(heads_LHD[..., :half], sin_L1D[..., half:], value=sign)
    return out_LHD


def _sum_and_norm(norm: Any, states_LD: Tensor, added_LD: Tensor | None) -> tuple[Tensor, Tensor]:
    sums_LD = states_LD if added_LD is None else states_LD + added_LD
    return sums_LD, rms_norm(norm, sums_LD)


def _norm_and_rotary(heads_LHD: Tensor, norm: Any, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    return rotary(heads_LHD if norm is None else rms_norm(norm, heads_LHD), cos_LD, sin_LD)


BY_TORCH = Operators(
    _sum_and_norm,
    _sum_and_norm,
    _norm_and_rotary,
    partial(heads_apart, _norm_and_rotary),
    lambda mlp, normed_LD: mlp(normed_LD),
)


def operators_for(placement: Placement, config: Any) -> Operators:
    """Choose kernels if they run on the device and support the model's MLP; otherwise torch's operators."""
    if not gates_are_known(config):
        return BY_TORCH
    if placement.low is not None and kernels_are_here(placement.device):
        return by_kernels(placement.low)
    head_dim = read_head_dim(config.get_text_config())
    cpu = kernels_for(placement.device, in_float32=placement.low is None, head_dim=head_dim)
    return BY_TORCH if cpu is None else _in_float32(kernel_operators.operators(cpu, torch.float32, None))


def _in_float32(operators: Operators) -> Operators:
    """Use `operators` in float32, but torch's under autocast, for other dtypes and for modules with hooks."""

    def either(name: str) -> Any:
        own, other = getattr(operators, name), getattr(BY_TORCH, name)

        def computed(*given: Any) -> Any:
            return (own if all(map(_is_plain, given)) else other)(*given)

        return computed

    return Operators(*map(either, ("norm", "last_norm", "rotary", "heads", "mlp")))


def _is_plain(given: Any) -> bool:
    if isinstance(given, Tensor):
        return given.dtype == torch.float32 and not torch.is_autocast_enabled(given.device.type)
    if isinstance(given, torch.nn.Module):
        return not any(module._forward_hooks or module._forward_pre_hooks for module in given.modules())
    return True


def gates_are_known(config: Any) -> bool:
    """Return whether the kernels support the activation function of the model's MLPs (only SiLU)."""
    return getattr(config.get_text_config(), "hidden_act", None) == "silu"


def by_kernels(out: torch.dtype = torch.bfloat16) -> Operators:
    """Return operators by Triton's kernels, which the caller has found to run here (`kernels_are_here`).

    `out` is the dtype of results that enter a matrix product.
    """
    from trainer_backend.models import kernels

    reading = Reading(kernels.token_logprobs, partial(kernels.token_logprobs_backward, out=out))
    return kernel_operators.operators(kernels, out, reading)
