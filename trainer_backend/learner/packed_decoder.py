"""The forward pass over one row of packed segments, for decoders that are built as Llama is.

It is that of `transformers` with the model's own modules and adapters, or their weights, but for two things:

    last layer    queries, and all that comes after attention, for the N tokens that are read and no others:
                  behind its keys and values no token reads another one
    between       norms, rotations and gates by `operators`, in fewer passes over the states

Most tokens of an agent's prompts predict no sampled one. With 2 layers the first saves a third of a forward
pass, with 28 of them 2 to 3 %.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from trainer_backend.core.collate import Packed
from trainer_backend.core.logprobs import Reading
from trainer_backend.learner.by_length import Attend
from trainer_backend.learner.sharding import through

# The residual stream, [L, D], and what is still to be added to it: the next norm reads both anyway.
Stream = tuple[Tensor, Tensor | None]
# By model_type: pre-norm layers with `self_attn` and `mlp`, and positions that turn the halves of a head.
FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})


def is_known(model: PreTrainedModel) -> bool:
    """Whether `read_states` computes this model."""
    return model.config.get_text_config().model_type in FAMILIES


@dataclass(frozen=True, slots=True)
class Operators:
    """What a layer computes between its products; see `learner.operators`.

    norm: (norm, states [L, D], what is to be added to them or None) to their sum, and its norm.
    last_norm: the same for the model's last norm, whose result is float32.
    rotary: (heads [L, H, D], their norm or None, cos [L, D], sin [L, D]) to normed and rotated heads.
    heads: (a layer's attention, normed states [L, D], cos, sin) to queries [L, H, D], keys and values.
    mlp: (a layer's module, normed states [L, D]) to what it adds, [L, D].
    reading: of log-probs off logits.
    """

    norm: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    last_norm: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    rotary: Callable[[Tensor, Any, Tensor, Tensor], Tensor]
    heads: Callable[[Any, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    mlp: Callable[[Any, Tensor], Tensor]
    reading: Reading | None = None


@dataclass(frozen=True, slots=True)
class _Row:
    """What the layers share.

    cos_LD, sin_LD: [L, head_dim], of the positions.
    attend: causal attention of all tokens.
    read_N: the tokens that are read.
    attend_read: attention of the queries of these alone; None: `attend` is as cheap.
    operators: what is computed between products.
    """

    cos_LD: Tensor
    sin_LD: Tensor
    attend: Attend
    read_N: Tensor
    attend_read: Attend | None
    operators: Operators


def read_states(
    model: PreTrainedModel,
    rows: Packed,
    tokens: Mapping[str, Tensor],
    attend: Attend,
    attend_read: Attend | None,
    operators: Operators,
    reads: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """[N, D] last hidden states, after the norm, where sampled tokens are predicted.

    `rows` are one row, on the model's device; `tokens` its `input_ids` or `inputs_embeds`, [1, L]. `attend`
    makes of q [L, H, D], k and v [L, H_kv, D] and a scale [L, H, D], `attend_read` the same of N queries.
    Where one place predicts several sampled tokens, `reads` are the places once, and which one is each's.
    """
    base: Any = model.model
    embedded_BLD = tokens.get("inputs_embeds")
    if embedded_BLD is None:
        embedded_BLD = base.embed_tokens(tokens["input_ids"])
    cos_BLD, sin_BLD = base.rotary_emb(embedded_BLD, rows.position_ids_BL)
    read_N = rows.predict_position_N if reads is None else reads[0]
    row = _Row(cos_BLD[0], sin_BLD[0], attend, read_N, attend_read, operators)
    stream: Stream = embedded_BLD[0], None
    *most, last = base.layers
    for layer in most:
        stream = through(layer, _kept_or_again, stream, row, False)
    hidden_ND, added_ND = through(last, _kept_or_again, stream, row, True)
    normed_ND = operators.last_norm(base.norm, hidden_ND, added_ND)[1]
    return normed_ND if reads is None else normed_ND.index_select(0, reads[1])


def _kept_or_again(layer: Any, stream: Stream, row: _Row, is_last: bool) -> Stream:
    """The layer's output; the backward pass computes it again where layers are checkpointed."""
    if layer.gradient_checkpointing and layer.training:
        hidden_LD, added_LD = stream  # one tensor is kept of a layer
        whole = hidden_LD if added_LD is None else hidden_LD + added_LD, None
        out: Stream = checkpoint(_output, layer, whole, row, is_last, use_reentrant=False)
        return out
    return _output(layer, stream, row, is_last)


def _output(layer: Any, stream: Stream, row: _Row, is_last: bool) -> Stream:
    """[L, D] to [L, D], or of the last layer to [N, D]."""
    hidden_LD, normed_LD = row.operators.norm(layer.input_layernorm, *stream)
    attended = _attended(layer.self_attn, normed_LD, row, is_last=is_last)
    if is_last:
        hidden_LD = hidden_LD.index_select(0, row.read_N)
    added_LD = layer.self_attn.o_proj(attended.flatten(1))
    hidden_LD, normed_LD = row.operators.norm(layer.post_attention_layernorm, hidden_LD, added_LD)
    return hidden_LD, row.operators.mlp(layer.mlp, normed_LD)


def _attended(attention: Any, normed_LD: Tensor, row: _Row, *, is_last: bool) -> Tensor:
    """[L, H, D], or of the last layer [N, H, D]."""
    angles_LD, rotary = (row.cos_LD, row.sin_LD), row.operators.rotary
    if is_last and row.attend_read is not None:
        k_LHD = rotary(*projection(attention, "k", normed_LD), *angles_LD)
        v_LHD, _ = projection(attention, "v", normed_LD)
        cos_ND, sin_ND = (angle_LD.index_select(0, row.read_N) for angle_LD in angles_LD)
        q_NHD = rotary(*projection(attention, "q", normed_LD.index_select(0, row.read_N)), cos_ND, sin_ND)
        return row.attend_read(q_NHD, k_LHD, v_LHD, attention.scaling)
    q_LHD, k_LHD, v_LHD = row.operators.heads(attention, normed_LD, *angles_LD)
    attended_LHD = row.attend(q_LHD, k_LHD, v_LHD, attention.scaling)
    return attended_LHD.index_select(0, row.read_N) if is_last else attended_LHD


def projection(attention: Any, what: str, normed_LD: Tensor) -> tuple[Tensor, Any]:
    """[L, H, D] queries, keys or values, and their norm, None where the model has none of single heads."""
    flat: Tensor = getattr(attention, f"{what}_proj")(normed_LD)
    heads: Tensor = flat.view(len(flat), -1, int(attention.head_dim))
    return heads, getattr(attention, f"{what}_norm", None)


def heads_apart(
    rotary: Callable[[Tensor, Any, Tensor, Tensor], Tensor],
    attention: Any,
    normed_LD: Tensor,
    cos_LD: Tensor,
    sin_LD: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """By a product each."""
    q_LHD, k_LHD = (rotary(*projection(attention, what, normed_LD), cos_LD, sin_LD) for what in "qk")
    return q_LHD, k_LHD, projection(attention, "v", normed_LD)[0]
