"""Computes log-probs and entropies of sampled tokens from hidden states, in chunks of tokens."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Three float32 tensors of the logits' size exist at a time: logits, log-softmax and a temporary tensor.
BYTES_PER_LOGIT = 12
# Maximum number of tokens in a chunk: larger chunks do not multiply faster, even if they fit in memory.
MOST_TOKENS = 1024


class Reading(NamedTuple):
    """A pair of functions that compute log-probs of C tokens from logits, and the gradient of the logits.

    z stands for logits / temperature, V for the size of the vocabulary.
    """

    read: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    """(logits [C, V], targets [C], temperatures [C]) -> (log-probs, entropies, log sum exp z), each [C]. The
    function may overwrite the logits."""
    back: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
    """(logits, targets, temperatures, entropies, log sum exp z, gradient of the log-probs, gradient of the
    entropies) -> gradient of the logits, [C, V]. The function may overwrite the logits."""


class LogitMap(NamedTuple):
    """Computes logits: multiplies the outputs of an LM head (`products`) by a scale and soft-caps them.

    logits = cap * tanh(scale * products / cap),   without a cap: scale * products
    """

    scale: float = 1.0
    cap: float | None = None

    def __call__(self, products: Tensor) -> Tensor:
        """Return the logits; with scale 1 and no cap, this is the tensor `products` itself."""
        scaled = products if self.scale == 1.0 else products * self.scale
        return scaled if self.cap is None else self.cap * (scaled / self.cap).tanh()


PLAIN = LogitMap()


def chunk_within(budget_bytes: int, vocabulary: int) -> int:
    """Return the number of tokens, from 1 to MOST_TOKENS, whose logits fit in `budget_bytes`."""
    return max(1, min(MOST_TOKENS, budget_bytes // (BYTES_PER_LOGIT * vocabulary)))


def chunked_logprobs(
    hidden_ND: Tensor,
    head_weight_VD: Tensor,
    target_N: Tensor,
    temperature_N: Tensor,
    *,
    chunk: int = MOST_TOKENS,
    factors: torch.dtype | None = None,
    reading: Reading | None = None,
    bias_V: Tensor | None = None,
    logits: LogitMap = PLAIN,
) -> tuple[Tensor, Tensor]:
    """Compute the log-prob of each target token, and the entropy of the distribution at its position.

        logits = map(hidden_ND @ head_weight_VD.T + bias_V)
        logp_n = log softmax(logits_n / temperature_n)[target_n]

    Logits of only `chunk` tokens exist at a time, and the backward pass recomputes them, so memory grows with
    chunk * V, not with N * V. Logits are float32 or wider for every dtype of the model: bfloat16 could round
    a logit of 20, and so its log-prob, by 0.06.

    Args:
        hidden_ND: hidden states at the positions that predict the targets.
        head_weight_VD: the weight of the LM head.
        target_N: int64 token ids.
        temperature_N: sampling temperatures, above 0.
        chunk: maximum number of tokens whose logits exist at a time.
        factors: dtype to which hidden states and head are rounded before they are multiplied; their products
            are summed in float32. None: not rounded.
        reading: the implementation that computes log-probs from logits; None: `BY_TORCH`.
        bias_V: bias of the LM head; None: no bias.
        logits: scale and cap of the logits.

    Returns:
        [N] log-probs and [N] entropies, in nats, differentiable in hidden states, head and bias.

    Raises:
        ValueError: if `chunk` is below 1.

    Source: DESIGN.md 4.9; the recomputation: Chen et al., Sublinear Memory Cost, arXiv:1604.06174.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if logits.cap is None and logits.scale != 1.0:  # without a cap, the scale acts as an inverse temperature
        temperature_N, logits = temperature_N / logits.scale, PLAIN
    wide = torch.promote_types(hidden_ND.dtype, torch.float32)
    if len(target_N) <= chunk and factors is None and reading is None and hidden_ND.dtype == wide:
        # With a single chunk, recomputation would save no memory.
        products_NV = hidden_ND @ head_weight_VD.T
        logits_NV = logits(products_NV if bias_V is None else products_NV + bias_V)
        logp_NV = (logits_NV / temperature_N[:, None]).log_softmax(dim=-1)
        entropies_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
        return logp_NV.gather(-1, target_N[:, None]).squeeze(-1), entropies_N
    found: tuple[Tensor, Tensor] = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_ND, head_weight_VD, bias_V, target_N, temperature_N, chunk, factors or hidden_ND.dtype,
        reading or BY_TORCH, logits,
    )  # fmt: skip
    return found


class _ChunkedLogprobs(torch.autograd.Function):
    """Saves hidden states, head and [N] tensors for the backward pass, which recomputes all [C, V] tensors.

    With z = logits / T, p = softmax(z) and H the entropy of p, the gradients with respect to the logits are:

        d logp_n = (onehot(target) - p) / T        dH = -p * (log p + H) / T

    With a cap, the gradient of the head's outputs is that of the logits, multiplied by
    scale * (1 - (logits / cap)^2).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        head_VD: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        temperature_N: Tensor,
        chunk: int,
        factors: torch.dtype,
        reading: Reading,
        logits: LogitMap,
    ) -> tuple[Tensor, Tensor]:
        wide = torch.promote_types(hidden_ND.dtype, torch.float32)
        logprobs_N, entropies_N, totals_N = (hidden_ND.new_empty(len(target_N), dtype=wide) for _ in range(3))
        hidden, head = hidden_ND.to(factors), head_VD.to(factors)
        for part in _parts(len(target_N), chunk):
            logits_CV = _logits(hidden[part], head, bias_V, logits)
            found = reading.read(logits_CV, target_N[part], temperature_N[part])
            logprobs_N[part], entropies_N[part], totals_N[part] = found
        ctx.save_for_backward(hidden_ND, head_VD, bias_V, target_N, temperature_N, entropies_N, totals_N)
        ctx.chunk, ctx.factors, ctx.reading, ctx.logits = chunk, factors, reading, logits
        return logprobs_N, entropies_N

    @staticmethod
    def backward(ctx: Any, *gradients_N: Tensor) -> tuple[Tensor | None, ...]:
        hidden_ND, head_VD, bias_V, *columns_N = ctx.saved_tensors
        hidden, head = hidden_ND.to(ctx.factors), head_VD.to(ctx.factors)
        d_hidden = torch.empty_like(hidden_ND) if ctx.needs_input_grad[0] else None
        # Summed in float32: a bfloat16 sum over many chunks would lose small terms.
        wide = columns_N[-1].dtype
        d_head = torch.zeros_like(head_VD, dtype=wide) if ctx.needs_input_grad[1] else None
        d_bias = torch.zeros_like(bias_V, dtype=wide) if ctx.needs_input_grad[2] else None
        columns_N += [gradient_N.contiguous() for gradient_N in gradients_N]
        for part in _parts(len(hidden_ND), ctx.chunk):
            logits_CV = _logits(hidden[part], head, bias_V, ctx.logits)
            slope_CV = None
            if ctx.logits.cap is not None:  # computed first, because `back` overwrites the logits
                slope_CV = (logits_CV / ctx.logits.cap).square_().neg_().add_(1.0).mul_(ctx.logits.scale)
            d_CV = ctx.reading.back(logits_CV, *(column[part] for column in columns_N))
            if slope_CV is not None:
                d_CV = d_CV.mul_(slope_CV)
            if d_bias is not None:
                d_bias += d_CV.sum(dim=0)
            d_CV = d_CV.to(ctx.factors)
            if d_hidden is not None:
                d_hidden[part] = wide_product(d_CV, head).to(d_hidden.dtype)
            if d_head is not None:
                add_wide_product(d_head, d_CV.T, hidden[part])
        d_head, d_bias = (
            by if by is None else by.to(own.dtype) for by, own in ((d_head, head_VD), (d_bias, bias_V))
        )
        return d_hidden, d_head, d_bias, *[None] * 6


def _logits(hidden_CD: Tensor, head_VD: Tensor, bias_V: Tensor | None, logits: LogitMap) -> Tensor:
    """Compute the logits, [C, V]; bias, scale and cap are applied in place to the product."""
    products_CV = wide_product(hidden_CD, head_VD.T)
    if bias_V is not None:
        products_CV.add_(bias_V)
    if logits.scale != 1.0:
        products_CV.mul_(logits.scale)
    return products_CV if logits.cap is None else products_CV.div_(logits.cap).tanh_().mul_(logits.cap)


def _read(logits_CV: Tensor, target_C: Tensor, temperature_C: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    target_C1 = target_C[:, None]
    tempered_CV = logits_CV.div_(temperature_C[:, None])
    logp_CV = tempered_CV.log_softmax(dim=-1)
    logp_C = logp_CV.gather(-1, target_C1)[:, 0]
    total_C = tempered_CV.gather(-1, target_C1)[:, 0] - logp_C
    return logp_C, logp_CV.exp().mul_(logp_CV).sum(dim=-1).neg_(), total_C


def _back(
    logits_CV: Tensor,
    target_C: Tensor,
    temperature_C: Tensor,
    entropy_C: Tensor,
    total_C: Tensor,
    by_logprob_C: Tensor,
    by_entropy_C: Tensor,
) -> Tensor:
    """Compute the gradient of the logits; overwrite `logits_CV` to save memory."""
    temperature_C1, by_logprob_C1 = temperature_C[:, None], by_logprob_C[:, None]
    logp_CV = logits_CV.div_(temperature_C1).sub_(total_C[:, None])
    p_CV = logp_CV.exp()
    d_CV = logp_CV.add_(entropy_C[:, None]).mul_(by_entropy_C[:, None]).add_(by_logprob_C1).mul_(p_CV).neg_()
    return d_CV.scatter_add_(1, target_C[:, None], by_logprob_C1).div_(temperature_C1)


BY_TORCH = Reading(_read, _back)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Compute a @ b with sums and result in float32 or a wider dtype."""
    wide = torch.promote_types(a.dtype, torch.float32)
    if a.dtype == wide:
        return a @ b
    if a.is_cuda and multiplies_wide():
        return torch.mm(a, b, out_dtype=wide)
    return a.to(wide) @ b.to(wide)


def add_wide_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b in place to `total`, which must have the dtype of `wide_product(a, b)`.

    On a GPU with torch below 2.10, low-precision factors need a temporary tensor of the size of `total`.
    """
    if a.is_cuda and a.dtype != total.dtype:
        if adds_wide():
            torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
        else:
            total += wide_product(a, b)
    else:
        total.addmm_(a.to(total.dtype), b.to(total.dtype))


def multiplies_wide() -> bool:
    """Return whether torch.mm can multiply low-precision factors to a float32 result (from torch 2.8 on)."""
    return hasattr(torch.ops.aten.mm, "dtype")


def adds_wide() -> bool:
    """Return whether torch.addmm can add low-precision products to a float32 tensor (torch 2.10 on)."""
    major, minor = torch.__version__.split(".")[:2]
    return (int(major), int(minor)) >= (2, 10)


def _parts(count: int, chunk: int) -> list[slice]:
    return [slice(start, start + chunk) for start in range(0, count, chunk)]
