"""Computes attention on a CPU separately over keys that queries share and over other keys, and joins both.

Let o_i be the output of part i, and l_i the log-sum-exp of its scores. Over all keys, the two are

    l = log sum_i exp(l_i)      o = sum_i exp(l_i - l) o_i

The backward pass of each part is exact if it receives o and l instead of o_i and l_i.

Source: Dao, FlashAttention-2, arXiv:2307.08691 (forward and backward by blocks); Liu et al., Ring Attention,
arXiv:2310.01889 (separate blocks, then joined).
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

_FORWARD_NAME = "_scaled_dot_product_flash_attention_for_cpu"
_BACKWARD_NAME = f"{_FORWARD_NAME}_backward"
# None if this version of torch has no such operator.
_FORWARD: Any = getattr(torch.ops.aten, _FORWARD_NAME, None)
_BACKWARD: Any = getattr(torch.ops.aten, _BACKWARD_NAME, None)
# Up to this number of keys, plain products are faster on a CPU than torch's kernel, which works in blocks.
_SHORT = 128


@cache
def why_no_parts() -> str | None:
    """Return why torch's private operators do not support attention in parts; None if they do."""
    forward = "query key value dropout_p is_causal attn_mask scale"
    backward = "grad_out query key value out logsumexp dropout_p is_causal attn_mask scale"
    for name, operator, wanted in (
        (_FORWARD_NAME, _FORWARD, forward),
        (_BACKWARD_NAME, _BACKWARD, backward),
    ):
        known = [] if operator is None else [argument.name for argument in operator.default._schema.arguments]
        if known != wanted.split():
            return f"torch {torch.__version__} has no {name}({', '.join(wanted.split())})"
    return None


def join(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Join the output and log-sum-exp of a further part to `out` [n, H, D] and `lse` [n, H], in place."""
    out.lerp_(part, (part_lse - lse).sigmoid_()[..., None])  # exp(l_2 - l) = 1 / (1 + exp(l_1 - l_2))
    torch.logaddexp(lse, part_lse, out=lse)


def widened(v: Tensor, size: int) -> Tensor:
    """Pad the last axis of values with zeros to `size`, the keys' head dimension.

    The kernels need keys and values of equal head dimension; DeepSeek's values are narrower.
    """
    return v if v.shape[-1] == size else torch.nn.functional.pad(v, (0, size - v.shape[-1]))


def heads_first(tokens: Tensor) -> Tensor:
    """Transpose tokens [n, H, D] to [1, H, n, D]."""
    return tokens.transpose(0, 1)[None]


def folded(tokens: Tensor, kv_heads: int) -> Tensor:
    """Reshape [n, H, D] to [1, H_kv, n * H / H_kv, D]: heads with the same key head become one head."""
    times = tokens.shape[1] // kv_heads
    if times == 1:
        return heads_first(tokens)
    by_key = tokens.reshape(len(tokens), kv_heads, times, -1)
    return by_key.permute(1, 0, 2, 3).flatten(1, 2)[None]


def unfolded(part: Tensor, heads: int) -> Tensor:
    """Undo `folded`, and return [n, H, D] with `heads` heads."""
    times = heads // part.shape[1]
    by_key = part[0].reshape(part.shape[1], -1, times, part.shape[-1])
    return by_key.permute(1, 0, 2, 3).flatten(1, 2)


def attended(
    q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None, causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Compute the attention output [B, H, n, D] and the log-sum-exp [B, H, n] of one part.

    Queries do not attend to keys where `hidden` is true; with `hidden`, `causal` is ignored.
    """
    if hidden is None and k.shape[2] > _SHORT:
        out, lse = _FORWARD(q, k, v, 0.0, causal, scale=scale)
        return out, lse if _lse_is_by_head() else lse.transpose(1, 2)
    scores = _scores(q, k, hidden, causal, scale)
    lse = scores.logsumexp(-1)
    return scores.sub_(lse[..., None]).exp_() @ v, lse


def attended_under(mask_B1NL: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Compute `attended` with a mask that is added to the scores. There is no backward pass for it."""
    out, lse = _FORWARD(q, k, v, 0.0, False, attn_mask=mask_B1NL, scale=scale)
    return out, lse if _lse_is_by_head() else lse.transpose(1, 2)


def gradients(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
    hidden: Tensor | None, causal: bool, scale: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute one part's gradients of queries, keys and values.

    `out` and `lse` are the output and log-sum-exp over all parts.
    """
    if hidden is None and k.shape[2] > _SHORT:
        lse = lse if _lse_is_by_head() else lse.transpose(1, 2)
        dq, dk, dv = _BACKWARD(
            grad.contiguous(), q, k, v, out.contiguous(), lse.contiguous(), 0.0, causal, scale=scale
        )
        return dq, dk, dv
    shares = _scores(q, k, hidden, causal, scale).sub_(lse[..., None]).exp_()
    d_scores = (grad @ v.transpose(-1, -2)).sub_((grad * out).sum(-1, keepdim=True)).mul_(shares)
    d_scores.mul_(scale)
    return d_scores @ k, d_scores.transpose(-1, -2) @ q, shares.transpose(-1, -2) @ grad


def _scores(q: Tensor, k: Tensor, hidden: Tensor | None, causal: bool, scale: float) -> Tensor:
    scores = (q * scale) @ k.transpose(-1, -2)
    if hidden is not None:
        return scores.masked_fill_(hidden[:, None], float("-inf"))
    if causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu_(1)
        return scores.masked_fill_(later, float("-inf"))
    return scores


@cache
def _lse_is_by_head() -> bool:
    """Return whether torch's kernel returns the log-sum-exp as [B, H, n] instead of [B, n, H]."""
    some = torch.zeros(1, 1, 2, 8)
    return tuple(_FORWARD(some, some, some)[1].shape) == (1, 1, 2)
