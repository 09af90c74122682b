"""What a decoder's layer computes between its products, with gradients: by torch's operators, or by kernels.

Both have the places of rounding of `models.precision`. The kernels (`models.kernels`) are for CUDA with
bfloat16: they take and give products in it, read the states once, and keep less for the backward pass.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_backend.core.logprobs import Reading, wide_product
from trainer_backend.inference.paged_attention import kernels_are_here
from trainer_backend.learner.device import Placement


@dataclass(frozen=True, slots=True)
class Operators:
    """The ways of a layer.

    normed: (norm, states [L, D], what is to be added to them or None) to their sum, and its norm.
    last_normed: the same for the model's last norm, which is float32 for whoever reads it.
    turned: (heads [L, H, D], their norm or None, cos [L, D], sin [L, D]) to normed and rotated heads.
    heads: (a layer's attention, normed states [L, D], cos, sin) to queries [L, H, D], keys and values.
    mlp: (a layer's module, normed states [L, D]) to what it adds, [L, D].
    reading: of log-probs off logits.
    """

    normed: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    last_normed: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    turned: Callable[[Tensor, Any, Tensor, Tensor], Tensor]
    heads: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    mlp: Callable[[Any, Tensor], Tensor]
    reading: Reading | None = None


def normed(norm: Any, states: Tensor) -> Tensor:
    """The root-mean-square norm of the last dimension by a module of these families.

        x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    if states.dtype != torch.float32 or torch.is_autocast_enabled(states.device.type):
        # As the engine rounds: a difference in the last bit may become one in the last bit of bfloat16.
        out: Tensor = norm(states)
        return out
    own: Tensor = _Normed.apply(states, norm.weight, norm.variance_epsilon)  # type: ignore[no-untyped-call]
    return own


class _Normed(torch.autograd.Function):
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


def rotated(heads_LHD: Tensor, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    """[L, H, D] turned by position, in the type of the angles: x * cos + (-x2, x1) * sin, for halves x1, x2.

    Source: Su et al., RoFormer, arXiv:2104.09864; the halves as in transformers.
    """
    turned: Tensor = _Rotated.apply(heads_LHD, cos_LD[:, None], sin_LD[:, None])  # type: ignore[no-untyped-call]
    return turned


class _Rotated(torch.autograd.Function):
    """A rotation's gradient is turned back, which needs the angles and no input."""

    @staticmethod
    def forward(ctx: Any, heads_LHD: Tensor, cos_L1D: Tensor, sin_L1D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_L1D, sin_L1D)
        ctx.dtype = heads_LHD.dtype
        return _turn(heads_LHD.to(cos_L1D.dtype), cos_L1D, sin_L1D, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        cos_L1D, sin_L1D = ctx.saved_tensors
        return _turn(gradients[0], cos_L1D, sin_L1D, -1.0).to(ctx.dtype), None, None


def _turn(heads_LHD: Tensor, cos_L1D: Tensor, sin_L1D: Tensor, sign: float) -> Tensor:
    half = heads_LHD.shape[-1] // 2
    turned = heads_LHD * cos_L1D
    turned[..., :half].addcmul_(heads_LHD[..., half:], sin_L1D[..., :half], value=-sign)
    turned[..., half:].addcmul_(heads_LHD[..., :half], sin_L1D[..., half:], value=sign)
    return turned


def _normed_sum(norm: Any, states_LD: Tensor, added_LD: Tensor | None) -> tuple[Tensor, Tensor]:
    sums_LD = states_LD if added_LD is None else states_LD + added_LD
    return sums_LD, normed(norm, sums_LD)


def _normed_and_rotated(heads_LHD: Tensor, norm: Any, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
    return rotated(heads_LHD if norm is None else normed(norm, heads_LHD), cos_LD, sin_LD)


def projected(attention: Any, what: str, normed_LD: Tensor) -> tuple[Tensor, Any]:
    """[L, H, D] queries, keys or values, and their norm, None where the model has none of single heads."""
    flat: Tensor = getattr(attention, f"{what}_proj")(normed_LD)
    heads: Tensor = flat.view(len(flat), -1, int(attention.head_dim))
    return heads, getattr(attention, f"{what}_norm", None)


Turned = Callable[[Tensor, Any, Tensor, Tensor], Tensor]


def _heads(
    turned: Turned, attention: Any, normed_LD: Tensor, cos_LD: Tensor, sin_LD: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q_LHD, k_LHD = (turned(*projected(attention, what, normed_LD), cos_LD, sin_LD) for what in "qk")
    return q_LHD, k_LHD, projected(attention, "v", normed_LD)[0]


BY_TORCH = Operators(
    _normed_sum,
    _normed_sum,
    _normed_and_rotated,
    partial(_heads, _normed_and_rotated),
    lambda mlp, normed_LD: mlp(normed_LD),
)


def operators_for(placement: Placement, config: Any) -> Operators:
    """By kernels where they run and the model's gates are theirs.

    Args:
        config: the model's.
    """
    if placement.low is not None and gates_are_known(config) and computes_by_kernels(placement):
        return by_kernels(placement.low)
    return BY_TORCH


def gates_are_known(config: Any) -> bool:
    """Whether the gates of a model's layers are those of the kernels."""
    return getattr(config.get_text_config(), "hidden_act", None) == "silu"


def computes_by_kernels(placement: Placement) -> bool:
    """Whether kernels run there, for products of a low precision."""
    return placement.low is not None and kernels_are_here(placement.device)


def by_kernels(out: torch.dtype = torch.bfloat16) -> Operators:
    """The same by Triton's kernels, which are there (`paged_attention.kernels_are_here`).

    Args:
        out: type of products' factors.
    """

    def summed_and_normed(
        dtype: torch.dtype, norm: Any, states_LD: Tensor, added_LD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = states_LD, added_LD, norm.weight, norm.variance_epsilon, dtype
        pair: tuple[Tensor, Tensor] = _KernelNorm.apply(*given)  # type: ignore[no-untyped-call]
        return (states_LD, pair[1]) if added_LD is None else pair

    def turned(heads_LHD: Tensor, norm: Any, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        heads: Tensor = _KernelTurn.apply(heads_LHD, weight, eps, cos_LD, sin_LD, out)  # type: ignore[no-untyped-call]
        return heads

    def heads(
        attention: Any, normed_LD: Tensor, cos_LD: Tensor, sin_LD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = _plain_weights([attention.q_proj, attention.k_proj, attention.v_proj])
        if weights is None:
            return _heads(turned, attention, normed_LD, cos_LD, sin_LD)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
        of_norms = [None if norm is None else norm.weight for norm in norms]
        given = normed_LD, *weights, *of_norms, eps, cos_LD, sin_LD
        found: tuple[Tensor, Tensor, Tensor] = _KernelHeads.apply(*given)  # type: ignore[no-untyped-call]
        return found

    def mlp(module: Any, normed_LD: Tensor) -> Tensor:
        weights = _plain_weights([module.gate_proj, module.up_proj])
        if weights is None:
            given = module.gate_proj(normed_LD), module.up_proj(normed_LD)
            opened: Tensor = _KernelGate.apply(*given)  # type: ignore[no-untyped-call]
        else:
            opened = _KernelOpened.apply(normed_LD, *weights)  # type: ignore[no-untyped-call]
        added: Tensor = module.down_proj(opened)
        return added

    return Operators(
        partial(summed_and_normed, out),
        partial(summed_and_normed, torch.float32),
        turned,
        heads,
        mlp,
        Reading(_chosen, partial(_chosen_back, out=out)),
    )


def _chosen(logits_CV: Tensor, target_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    from trainer_backend.models.kernels import chosen

    return chosen(logits_CV, target_C, temperature_C)


def _chosen_back(logits_CV: Tensor, *columns_C: Tensor, out: torch.dtype) -> Tensor:
    from trainer_backend.models.kernels import chosen_back

    return chosen_back(logits_CV, *columns_C, out=out)


class _KernelNorm(torch.autograd.Function):
    """The sum of states and what is added (None where nothing is), and its norm. Keeps the sum alone."""

    @staticmethod
    def forward(
        ctx: Any, states_LD: Tensor, added_LD: Tensor | None, weight_D: Tensor, eps: float, out: torch.dtype
    ) -> tuple[Tensor | None, Tensor]:
        from trainer_backend.models import kernels

        sums_LD = states_LD if added_LD is None else torch.empty_like(states_LD)
        normed_LD = kernels.normed(states_LD, added_LD, weight_D, eps, sums_TW=sums_LD, out=out)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(sums_LD, weight_D)
        ctx.eps, ctx.added = eps, None if added_LD is None else added_LD.dtype
        return None if added_LD is None else sums_LD, normed_LD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        from trainer_backend.models import kernels

        (by_sums_LD, by_normed_LD), (sums_LD, weight_D) = gradients, ctx.saved_tensors
        assert by_normed_LD is not None, "a norm's result is used wherever its sum is"
        by_states, by_added, by_weight = kernels.normed_back(
            sums_LD, weight_D, by_normed_LD.contiguous(),
            None if by_sums_LD is None else by_sums_LD.contiguous(),
            ctx.eps, added=ctx.added, weighs=ctx.needs_input_grad[2],
        )  # fmt: skip
        return by_states, by_added, by_weight, None, None


class _KernelTurn(torch.autograd.Function):
    """Heads, normed where there is a weight, and rotated."""

    @staticmethod
    def forward(
        ctx: Any,
        heads_LHD: Tensor,
        weight_D: Tensor | None,
        eps: float,
        cos_LD: Tensor,
        sin_LD: Tensor,
        out: torch.dtype,
    ) -> Tensor:
        from trainer_backend.models import kernels

        # A rotation's gradient needs the angles alone; a norm's needs its input.
        ctx.save_for_backward(None if weight_D is None else heads_LHD, weight_D, cos_LD, sin_LD)
        ctx.eps, ctx.dtype = eps, heads_LHD.dtype
        weights = None if weight_D is None else (weight_D, weight_D)
        return kernels.turned(
            heads_LHD, weights, cos_LD, sin_LD, None, queries=heads_LHD.shape[1], eps=eps, out=out
        )

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from trainer_backend.models import kernels

        heads_LHD, weight_D, cos_LD, sin_LD = ctx.saved_tensors
        by_out_LHD = gradients[0].contiguous()
        by_heads = torch.empty_like(by_out_LHD, dtype=ctx.dtype)
        by_weight = kernels.turned_back(
            by_out_LHD if heads_LHD is None else heads_LHD, weight_D, cos_LD, sin_LD, by_out_LHD,
            by_heads_TSD=by_heads, eps=ctx.eps, weighs=ctx.needs_input_grad[1],
        )  # fmt: skip
        return by_heads, by_weight, None, None, None, None


class _KernelGate(torch.autograd.Function):
    """silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, gate_LM: Tensor, up_LM: Tensor) -> Tensor:
        from trainer_backend.models import kernels

        ctx.save_for_backward(gate_LM, up_LM)
        return kernels.gated(gate_LM, up_LM)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        from trainer_backend.models import kernels

        gate_LM, up_LM = ctx.saved_tensors
        by_gate_LM, by_up_LM = kernels.gated_back(gate_LM, up_LM, gradients[0].contiguous()).chunk(2, dim=1)
        return by_gate_LM, by_up_LM


def _plain_weights(linears: Sequence[Any]) -> list[Tensor] | None:
    """The weights of linear layers that are nothing more: no biases, no adapters, and trained in float32."""
    weights = [linear.weight for linear in linears if type(linear) is nn.Linear and linear.bias is None]
    is_plain = len(weights) == len(linears) and all(weight.dtype == torch.float32 for weight in weights)
    return weights if is_plain else None


def _side_by_side(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """[sum of O, I] weights [O, I] with the same input, rounded once."""
    joined_OI = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=dtype)
    for weight, part in zip(
        weights, torch.split(joined_OI, [len(weight) for weight in weights]), strict=True
    ):
        part.copy_(weight)
    return joined_OI


def _by_weights(
    by_out_LO: Tensor, input_LI: Tensor, sizes: list[int], are_trained: bool
) -> Sequence[Tensor | None]:
    """Gradients of such weights, float32: parts of one tensor. Their sums are rounded nowhere."""
    return torch.split(wide_product(by_out_LO.T, input_LI), sizes) if are_trained else [None] * len(sizes)


class _KernelHeads(torch.autograd.Function):
    """Queries, keys and values by one product, normed where there are weights, and rotated.

    Each of the three would read the states once more, and their gradients would be added up.
    """

    @staticmethod
    def forward(
        ctx: Any,
        normed_LD: Tensor,
        q_OD: Tensor,
        k_OD: Tensor,
        v_OD: Tensor,
        q_norm_D: Tensor | None,
        k_norm_D: Tensor | None,
        eps: float,
        cos_LD: Tensor,
        sin_LD: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        from trainer_backend.models.kernels import turned

        weight_OD = _side_by_side([q_OD, k_OD, v_OD], normed_LD.dtype)
        size = cos_LD.shape[-1]
        ctx.counts = [len(weight) // size for weight in (q_OD, k_OD, v_OD)]
        all_LHD = (normed_LD @ weight_OD.T).view(len(normed_LD), -1, size)
        q_LHD, k_LHD, v_LHD = torch.split(all_LHD, ctx.counts, dim=1)
        q_LHD, k_LHD = (
            turned(
                heads_LHD, None if norm_D is None else (norm_D, norm_D), cos_LD, sin_LD, None,
                queries=heads_LHD.shape[1], eps=eps, out=normed_LD.dtype,
            )
            for heads_LHD, norm_D in ((q_LHD, q_norm_D), (k_LHD, k_norm_D))
        )  # fmt: skip
        ctx.save_for_backward(normed_LD, weight_OD, all_LHD, q_norm_D, k_norm_D, cos_LD, sin_LD)
        ctx.eps = eps
        return q_LHD, k_LHD, v_LHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from trainer_backend.models.kernels import turned_back

        normed_LD, weight_OD, all_LHD, q_norm_D, k_norm_D, cos_LD, sin_LD = ctx.saved_tensors
        by_all_LHD = torch.empty_like(all_LHD)
        *by_parts, by_v_LHD = torch.split(by_all_LHD, ctx.counts, dim=1)
        by_norms = [
            turned_back(
                heads_LHD, norm_D, cos_LD, sin_LD, gradient.contiguous(),
                by_heads_TSD=by_heads_LHD, eps=ctx.eps, weighs=is_trained,
            )
            for heads_LHD, norm_D, gradient, by_heads_LHD, is_trained in zip(
                torch.split(all_LHD, ctx.counts, dim=1)[:2], (q_norm_D, k_norm_D), gradients[:2], by_parts,
                ctx.needs_input_grad[4:6], strict=True,
            )
        ]  # fmt: skip
        by_v_LHD.copy_(gradients[2])
        by_all_LO = by_all_LHD.flatten(1)
        sizes = [count * all_LHD.shape[-1] for count in ctx.counts]
        by_weights = _by_weights(by_all_LO, normed_LD, sizes, any(ctx.needs_input_grad[1:4]))
        return by_all_LO @ weight_OD, *by_weights, *by_norms, None, None, None


class _KernelOpened(torch.autograd.Function):
    """silu(gate) * up, of both by one product."""

    @staticmethod
    def forward(ctx: Any, normed_LD: Tensor, gate_MD: Tensor, up_MD: Tensor) -> Tensor:
        from trainer_backend.models.kernels import gated

        weight_OD = _side_by_side([gate_MD, up_MD], normed_LD.dtype)
        both_LO = normed_LD @ weight_OD.T
        ctx.save_for_backward(normed_LD, weight_OD, both_LO)
        return gated(*both_LO.chunk(2, dim=1))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from trainer_backend.models.kernels import gated_back

        normed_LD, weight_OD, both_LO = ctx.saved_tensors
        gate_LM, up_LM = both_LO.chunk(2, dim=1)
        by_both_LO = gated_back(gate_LM, up_LM, gradients[0].contiguous())
        sizes = [len(weight_OD) // 2] * 2
        by_weights = _by_weights(by_both_LO, normed_LD, sizes, any(ctx.needs_input_grad[1:3]))
        return by_both_LO @ weight_OD, *by_weights
