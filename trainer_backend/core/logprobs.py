"""Log-probs and entropies of sampled tokens from hidden states, a chunk of tokens at a time."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def chunked_logprobs(
    hidden_ND: Tensor, head_weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, *, chunk: int = 1024
) -> tuple[Tensor, Tensor]:
    """Log-prob of each target and entropy of its distribution, under softmax(logits / temperature).

        logits = hidden_ND @ head_weight_VD.T        logp_n = log softmax(logits_n / temperature_n)[target_n]

    Only `chunk` rows of logits exist at a time, in the forward pass and, recomputed, in the backward pass:
    memory is chunk * V, not N * V. Logits are float32 or better, whatever the model computes in.

    Args:
        hidden_ND: hidden states at the positions that predict the targets.
        head_weight_VD: the weight of the LM head, without bias.
        target_N: int64 token ids.
        temperature_N: above 0.
        chunk: tokens at a time.

    Returns:
        [N] log-probs and [N] entropies, in nats, differentiable in hidden states and head.

    Raises:
        ValueError: chunk is below 1.

    Source: DESIGN.md 4.9; the recomputation: Chen et al., Sublinear Memory Cost, arXiv:1604.06174.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    if len(target_N) <= chunk:  # nothing to save: one chunk is in memory either way
        return _logprobs(hidden_ND, head_weight_VD, target_N, temperature_N)
    pieces = [
        checkpoint(_logprobs, *piece, use_reentrant=False, preserve_rng_state=False)
        for piece in _chunks(hidden_ND, head_weight_VD, target_N, temperature_N, chunk)
    ]
    logprobs, entropies = zip(*pieces, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _chunks(
    hidden_ND: Tensor, head_weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor, chunk: int
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    slices = [slice(start, start + chunk) for start in range(0, len(target_N), chunk)]
    return [(hidden_ND[part], head_weight_VD, target_N[part], temperature_N[part]) for part in slices]


def _logprobs(
    hidden_ND: Tensor, head_weight_VD: Tensor, target_N: Tensor, temperature_N: Tensor
) -> tuple[Tensor, Tensor]:
    logits_NV = hidden_ND @ head_weight_VD.T
    at_least_float32 = torch.promote_types(logits_NV.dtype, torch.float32)
    logp_NV = (logits_NV.to(at_least_float32) / temperature_N[:, None]).log_softmax(dim=-1)
    entropies_N = -(logp_NV.exp() * logp_NV).sum(dim=-1)
    return logp_NV.gather(-1, target_N[:, None]).squeeze(-1), entropies_N
