"""What a decoder's layer computes between its products, with gradients: by torch's operators, or by kernels.

Both have the places of rounding of `models.precision`. Triton's kernels (`models.kernels`) are for CUDA with
bfloat16: they take and give products in it, read the states once, and keep less for the backward pass. Those
of a CPU (`models.cpu_kernels`) are for float32.
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
    """The root-mean-square norm of the last dimension by a module of these families.

        x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    if states.dtype != torch.float32 or torch.is_autocast_enabled(states.device.type):
        # As the engine rounds: a difference in the last bit may become one in the last bit of bfloat16.
        out: Tensor = norm(states)
        return out
    own: Tensor = _RmsNorm.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return own


class _RmsNorm(torch.autograd.Function):
    """Keeps its input and a number a row. With x^ the input over its root mean square, r that number, g = dy:

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
        # A copy: where a weight lies in memory shows in the last bits of a product with it, and that of a
        # checkpoint lies elsewhere.
        means = (products @ weight_D.clone()).unsqueeze_(-1).div_(states.shape[-1])
        d_weight_D = products.flatten(0, -2).sum(0) if ctx.needs_input_grad[1] else None
        d_states = (gradient * weight_D).addcmul_(scaled, means, value=-1.0).mul_(inverse)
        return d_states, d_weight_D, None


def rotary(heads_LHD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """[L, H, D] turned by position, in the type of the angles: x * cos + (-x2, x1) * sin, for halves x1, x2.

    Source: Su et al., RoFormer, arXiv:2104.09864; the halves as in transformers.
    """
    out_LHD: Tensor = _Rotary.apply(heads_LHD, cos_LD[:, None], sin_LD[:, None])  # type: ignore[no-untyped-call]
    return out_LHD


class _Rotary(torch.autograd.Function):
    """A rotation's gradient is turned back, which needs the angles and no input."""

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
    """By kernels where they run and the model's gates are theirs."""
    if not gates_are_known(config):
        return BY_TORCH
    if placement.low is not None and computes_by_kernels(placement):
        return by_kernels(placement.low)
    head_dim = read_head_dim(config.get_text_config())
    cpu = kernels_for(placement.device, in_float32=placement.low is None, head_dim=head_dim)
    return BY_TORCH if cpu is None else _in_float32(kernel_operators.operators(cpu, torch.float32, None))


def _in_float32(operators: Operators) -> Operators:
    """The operators; those of torch under autocast, of another type, and where modules have hooks."""

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
    """Whether the gates of a model's layers are those of the kernels."""
    return getattr(config.get_text_config(), "hidden_act", None) == "silu"


def computes_by_kernels(placement: Placement) -> bool:
    """Whether kernels run there, for products of a low precision."""
    return placement.low is not None and kernels_are_here(placement.device)


def by_kernels(out: torch.dtype = torch.bfloat16) -> Operators:
    """By Triton's kernels, which are there (`kernels_are_here`); `out`: the type of products' factors."""
    from trainer_backend.models import kernels

    reading = Reading(kernels.token_logprobs, partial(kernels.token_logprobs_backward, out=out))
    return kernel_operators.operators(kernels, out, reading)
