"""Implements a layer's `Operators`, with gradients, by Triton's kernels (`models.kernels`) or CPU kernels.

For linear layers without biases and adapters, one matrix product computes queries, keys and values, and
another computes gate and up. Separate products would each read the hidden states again, and would each
compute a gradient of the hidden states, which would have to be added.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from trainer_backend.core.logprobs import Reading, wide_product
from trainer_backend.learner.packed_decoder import Operators, heads_apart


def operators(kernels: Any, out: torch.dtype, reading: Reading | None) -> Operators:
    """Build operators from the functions of the module `kernels`.

    `out` is the dtype of results that enter a matrix product. `reading` computes log-probs from logits; if it
    is None, torch computes them.
    """

    def sum_and_norm(
        dtype: torch.dtype, norm: Any, states_LD: Tensor, added_LD: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        given = kernels, states_LD, added_LD, norm.weight, norm.variance_epsilon, dtype
        pair: tuple[Tensor, Tensor] = _KernelNorm.apply(*given)  # type: ignore[no-untyped-call]
        return (states_LD, pair[1]) if added_LD is None else pair

    def rotary(heads_LHD: Tensor, norm: Any, cos_LD: Tensor, sin_LD: Tensor) -> Tensor:
        weight, eps = (None, 0.0) if norm is None else (norm.weight, norm.variance_epsilon)
        heads: Tensor = _KernelRotary.apply(kernels, heads_LHD, weight, eps, cos_LD, sin_LD, out)  # type: ignore[no-untyped-call]
        return heads

    def heads(
        attention: Any, normed_LD: Tensor, cos_LD: Tensor, sin_LD: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        weights = _plain_weights([attention.q_proj, attention.k_proj, attention.v_proj])
        if weights is None:
            return heads_apart(rotary, attention, normed_LD, cos_LD, sin_LD)
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        eps = 0.0 if norms[0] is None else norms[0].variance_epsilon
        of_norms = [None if norm is None else norm.weight for norm in norms]
        given = kernels, normed_LD, *weights, *of_norms, eps, cos_LD, sin_LD
        found: tuple[Tensor, Tensor, Tensor] = _KernelHeads.apply(*given)  # type: ignore[no-untyped-call]
        return found

    def mlp(module: Any, normed_LD: Tensor) -> Tensor:
        weights = _plain_weights([module.gate_proj, module.up_proj])
        if weights is None:
            given = kernels, module.gate_proj(normed_LD), module.up_proj(normed_LD)
            opened: Tensor = _KernelSwiglu.apply(*given)  # type: ignore[no-untyped-call]
        else:
            opened = _KernelGateUp.apply(kernels, normed_LD, *weights)  # type: ignore[no-untyped-call]
        added: Tensor = module.down_proj(opened)
        return added

    return Operators(
        partial(sum_and_norm, out),
        partial(sum_and_norm, torch.float32),
        rotary,
        heads,
        mlp,
        reading,
    )


class _KernelNorm(torch.autograd.Function):
    """Adds two hidden states, if there are two, and normalizes the sum. Saves only the sum for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        states_LD: Tensor,
        added_LD: Tensor | None,
        weight_D: Tensor,
        eps: float,
        out: torch.dtype,
    ) -> tuple[Tensor | None, Tensor]:
        sums_LD = states_LD if added_LD is None else torch.empty_like(states_LD)
        normed_LD = kernels.rms_norm(states_LD, added_LD, weight_D, eps, sums_TW=sums_LD, out=out)
        ctx.set_materialize_grads(False)
        ctx.kernels = kernels
        ctx.save_for_backward(sums_LD, weight_D)
        ctx.eps, ctx.added = eps, None if added_LD is None else added_LD.dtype
        return None if added_LD is None else sums_LD, normed_LD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        (by_sums_LD, by_normed_LD), (sums_LD, weight_D) = gradients, ctx.saved_tensors
        assert by_normed_LD is not None, "a norm's result is used wherever its sum is"
        by_states, by_added, by_weight = ctx.kernels.rms_norm_backward(
            sums_LD, weight_D, by_normed_LD.contiguous(),
            None if by_sums_LD is None else by_sums_LD.contiguous(),
            ctx.eps, added=ctx.added, weighs=ctx.needs_input_grad[3],
        )  # fmt: skip
        return None, by_states, by_added, by_weight, None, None


class _KernelRotary(torch.autograd.Function):
    """Applies rotary embeddings to heads. Normalizes the heads first if the weight of a norm is given."""

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
        heads_LHD: Tensor,
        weight_D: Tensor | None,
        eps: float,
        cos_LD: Tensor,
        sin_LD: Tensor,
        out: torch.dtype,
    ) -> Tensor:
        # The gradient of a rotation needs only the angles; that of a norm also needs the norm's input.
        ctx.kernels = kernels
        ctx.save_for_backward(None if weight_D is None else heads_LHD, weight_D, cos_LD, sin_LD)
        ctx.eps, ctx.dtype = eps, heads_LHD.dtype
        weights = None if weight_D is None else (weight_D, weight_D)
        turned_LHD: Tensor = kernels.rotary(
            heads_LHD, weights, cos_LD, sin_LD, None, queries=heads_LHD.shape[1], eps=eps, out=out
        )
        return turned_LHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        heads_LHD, weight_D, cos_LD, sin_LD = ctx.saved_tensors
        by_out_LHD = gradients[0].contiguous()
        by_heads = torch.empty_like(by_out_LHD, dtype=ctx.dtype)
        by_weight = ctx.kernels.rotary_backward(
            by_out_LHD if heads_LHD is None else heads_LHD, weight_D, cos_LD, sin_LD, by_out_LHD,
            by_heads_TSD=by_heads, eps=ctx.eps, weighs=ctx.needs_input_grad[2],
        )  # fmt: skip
        return None, by_heads, by_weight, None, None, None, None


class _KernelSwiglu(torch.autograd.Function):
    """Computes silu(gate) * up."""

    @staticmethod
    def forward(ctx: Any, kernels: Any, gate_LM: Tensor, up_LM: Tensor) -> Tensor:
        ctx.kernels = kernels
        ctx.save_for_backward(gate_LM, up_LM)
        opened_LM: Tensor = kernels.swiglu(gate_LM, up_LM)
        return opened_LM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, Tensor, Tensor]:
        gate_LM, up_LM = ctx.saved_tensors
        by_gate_LM, by_up_LM = ctx.kernels.swiglu_backward(gate_LM, up_LM, gradients[0].contiguous()).chunk(
            2, dim=1
        )
        return None, by_gate_LM, by_up_LM


def _plain_weights(linears: Sequence[Any]) -> list[Tensor] | None:
    """Return the weights if all layers are linear, in float32, without bias and adapter; else None."""
    weights = [linear.weight for linear in linears if type(linear) is nn.Linear and linear.bias is None]
    is_plain = len(weights) == len(linears) and all(weight.dtype == torch.float32 for weight in weights)
    return weights if is_plain else None


def _concatenate(weights: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Concatenate weights [O, I] along O, for layers with the same input; round them to `dtype`."""
    joined_OI = weights[0].new_empty((sum(map(len, weights)), weights[0].shape[1]), dtype=dtype)
    for weight, part in zip(
        weights, torch.split(joined_OI, [len(weight) for weight in weights]), strict=True
    ):
        part.copy_(weight)
    return joined_OI


def _weight_gradients(
    by_out_LO: Tensor, input_LI: Tensor, sizes: list[int], are_trained: bool
) -> Sequence[Tensor | None]:
    """Compute each weight's gradient, a view of one float32 tensor; None for weights that are not trained."""
    return torch.split(wide_product(by_out_LO.T, input_LI), sizes) if are_trained else [None] * len(sizes)


class _KernelHeads(torch.autograd.Function):
    """Computes queries, keys and values by one matrix product, and applies rotary embeddings.

    Queries and keys are normalized before the rotation if the weights of the norms are given.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kernels: Any,
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
        weight_OD = _concatenate([q_OD, k_OD, v_OD], normed_LD.dtype)
        size = cos_LD.shape[-1]
        ctx.counts = [len(weight) // size for weight in (q_OD, k_OD, v_OD)]
        all_LHD = (normed_LD @ weight_OD.T).view(len(normed_LD), -1, size)
        q_LHD, k_LHD, v_LHD = torch.split(all_LHD, ctx.counts, dim=1)
        q_LHD, k_LHD = (
            kernels.rotary(
                heads_LHD, None if norm_D is None else (norm_D, norm_D), cos_LD, sin_LD, None,
                queries=heads_LHD.shape[1], eps=eps, out=normed_LD.dtype,
            )
            for heads_LHD, norm_D in ((q_LHD, q_norm_D), (k_LHD, k_norm_D))
        )  # fmt: skip
        ctx.kernels = kernels
        ctx.save_for_backward(normed_LD, weight_OD, all_LHD, q_norm_D, k_norm_D, cos_LD, sin_LD)
        ctx.eps = eps
        return q_LHD, k_LHD, v_LHD

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normed_LD, weight_OD, all_LHD, q_norm_D, k_norm_D, cos_LD, sin_LD = ctx.saved_tensors
        by_all_LHD = torch.empty_like(all_LHD)
        *by_parts, by_v_LHD = torch.split(by_all_LHD, ctx.counts, dim=1)
        by_norms = [
            ctx.kernels.rotary_backward(
                heads_LHD, norm_D, cos_LD, sin_LD, gradient.contiguous(),
                by_heads_TSD=by_heads_LHD, eps=ctx.eps, weighs=is_trained,
            )
            for heads_LHD, norm_D, gradient, by_heads_LHD, is_trained in zip(
                torch.split(all_LHD, ctx.counts, dim=1)[:2], (q_norm_D, k_norm_D), gradients[:2], by_parts,
                ctx.needs_input_grad[5:7], strict=True,
            )
        ]  # fmt: skip
        by_v_LHD.copy_(gradients[2])
        by_all_LO = by_all_LHD.flatten(1)
        sizes = [count * all_LHD.shape[-1] for count in ctx.counts]
        by_weights = _weight_gradients(by_all_LO, normed_LD, sizes, any(ctx.needs_input_grad[2:5]))
        return None, by_all_LO @ weight_OD, *by_weights, *by_norms, None, None, None


class _KernelGateUp(torch.autograd.Function):
    """Computes silu(gate) * up, where one product computes both gate and up."""

    @staticmethod
    def forward(ctx: Any, kernels: Any, normed_LD: Tensor, gate_MD: Tensor, up_MD: Tensor) -> Tensor:
        weight_OD = _concatenate([gate_MD, up_MD], normed_LD.dtype)
        both_LO = normed_LD @ weight_OD.T
        ctx.kernels = kernels
        ctx.save_for_backward(normed_LD, weight_OD, both_LO)
        opened_LM: Tensor = kernels.swiglu(*both_LO.chunk(2, dim=1))
        return opened_LM

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        normed_LD, weight_OD, both_LO = ctx.saved_tensors
        gate_LM, up_LM = both_LO.chunk(2, dim=1)
        by_both_LO = ctx.kernels.swiglu_backward(gate_LM, up_LM, gradients[0].contiguous())
        sizes = [len(weight_OD) // 2] * 2
        by_weights = _weight_gradients(by_both_LO, normed_LD, sizes, any(ctx.needs_input_grad[2:4]))
        return None, by_both_LO @ weight_OD, *by_weights
