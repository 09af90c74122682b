"""The forward pass over one row of packed segments, for decoders that are built as Llama is.

It is that of `transformers` with the model's own modules, adapters and all, but for three things:

    last layer    queries, and all that comes after attention, for the N tokens that are read and no others:
                  behind its keys and values no token reads another one
    rotation      in one pass over queries and keys, and keeping none of them for the backward pass
    norms         of float32 by torch's kernel, or on a CPU with a gradient in a third of the passes

Most tokens of an agent's prompts predict no sampled one. With 2 layers the first saves a third of a forward
pass, with 28 of them 2 to 3 %.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed
from trainer_backend.learner.by_length import Attend
from trainer_backend.learner.sharding import through

# By model_type: pre-norm layers with `self_attn` and `mlp`, and positions that turn the halves of a head.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_known(model: PreTrainedModel) -> bool:
    """Whether `read_states` computes this model."""
    return model.config.get_text_config().model_type in FAMILIES


@dataclass(frozen=True, slots=True)
class _Row:
    """What the layers share.

    cos_LD, sin_LD: [L, head_dim], of the positions.
    attend: causal attention of all tokens.
    read_N: the tokens that are read.
    attend_read: attention of the queries of these alone; None: `attend` is as cheap.
    """

    cos_LD: Tensor
    sin_LD: Tensor
    attend: Attend
    read_N: Tensor
    attend_read: Attend | None


def read_states(
    model: PreTrainedModel,
    rows: Packed,
    tokens: Mapping[str, Tensor],
    attend: Attend,
    attend_read: Attend | None,
) -> Tensor:
    """[N, D] last hidden states, after the norm, where sampled tokens are predicted.

    Args:
        rows: one row, on the model's device.
        tokens: its `input_ids` or `inputs_embeds`, [1, L].
        attend: (q [L, H, D], k and v [L, H_kv, D], scale) to [L, H, D].
        attend_read: the same of N queries, to [N, H, D].
    """
    base: Any = model.model
    embedded_BLD = tokens.get("inputs_embeds")
    if embedded_BLD is None:
        embedded_BLD = base.embed_tokens(tokens["input_ids"])
    cos_BLD, sin_BLD = base.rotary_emb(embedded_BLD, rows.position_ids_BL)
    row = _Row(cos_BLD[0], sin_BLD[0], attend, rows.predict_position_N, attend_read)
    hidden_LD = embedded_BLD[0]
    *most, last = base.layers
    for layer in most:
        hidden_LD = through(layer, _kept_or_again, hidden_LD, row, False)
    return normed(base.norm, through(last, _kept_or_again, hidden_LD, row, True))


def _kept_or_again(layer: Any, hidden_LD: Tensor, row: _Row, is_last: bool) -> Tensor:
    """The layer's output; the backward pass computes it again where layers are checkpointed."""
    if layer.gradient_checkpointing and layer.training:
        out: Tensor = checkpoint(_output, layer, hidden_LD, row, is_last, use_reentrant=False)
        return out
    return _output(layer, hidden_LD, row, is_last)


def _output(layer: Any, hidden_LD: Tensor, row: _Row, is_last: bool) -> Tensor:
    """[L, D] to [L, D], or of the last layer to [N, D]."""
    normed_LD = normed(layer.input_layernorm, hidden_LD)
    attended = _attended(layer.self_attn, normed_LD, row, is_last=is_last)
    if is_last:
        hidden_LD = hidden_LD.index_select(0, row.read_N)
    hidden_LD = hidden_LD + layer.self_attn.o_proj(attended.flatten(1))
    out: Tensor = hidden_LD + layer.mlp(normed(layer.post_attention_layernorm, hidden_LD))
    return out


def _attended(attention: Any, normed_LD: Tensor, row: _Row, *, is_last: bool) -> Tensor:
    """[L, H, D], or of the last layer [N, H, D]."""
    k_LHD = rotated(_heads(attention, "k", normed_LD), row.cos_LD, row.sin_LD)
    v_LHD = _heads(attention, "v", normed_LD)
    if is_last and row.attend_read is not None:
        cos_ND, sin_ND = (turn.index_select(0, row.read_N) for turn in (row.cos_LD, row.sin_LD))
        q_NHD = rotated(_heads(attention, "q", normed_LD.index_select(0, row.read_N)), cos_ND, sin_ND)
        return row.attend_read(q_NHD, k_LHD, v_LHD, attention.scaling)
    q_LHD = rotated(_heads(attention, "q", normed_LD), row.cos_LD, row.sin_LD)
    attended_LHD = row.attend(q_LHD, k_LHD, v_LHD, attention.scaling)
    return attended_LHD.index_select(0, row.read_N) if is_last else attended_LHD


def _heads(attention: Any, what: str, normed_LD: Tensor) -> Tensor:
    """[L, H, D] queries, keys or values, normed head by head where the model has such norms."""
    flat: Tensor = getattr(attention, f"{what}_proj")(normed_LD)
    projected: Tensor = flat.view(len(flat), -1, int(attention.head_dim))
    norm: nn.Module | None = getattr(attention, f"{what}_norm", None)
    return projected if norm is None else normed(norm, projected)


def normed(norm: Any, states: Tensor) -> Tensor:
    """The root-mean-square norm of the last dimension by a module of these families.

        x / sqrt(mean(x^2) + eps) * weight

    Source: Zhang and Sennrich, arXiv:1910.07467.
    """
    if states.dtype != torch.float32 or torch.is_autocast_enabled(states.device.type):
        # As the engine rounds: a difference in the last bit may become one in the last bit of bfloat16.
        out: Tensor = norm(states)
        return out
    if states.is_cuda:  # torch has one kernel for it
        fused: Tensor = rms_norm(states, norm.weight.shape, norm.weight, norm.variance_epsilon)
        return fused
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
