"""Sampling of tokens from logits: pure functions over a batch, with counter-based random numbers.

The i-th token of a request uses the i-th number of the request's own stream, so neither its batch nor the
order of arrival can change the result.
"""

import hashlib
from array import array
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """Return the 64-bit key of a request's random stream, from its seed and its prompt.

    The prompt is included because an episode may send one seed with every decision: with the seed alone, all
    decisions would draw the same numbers and be correlated.
    """
    digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8, salt=_salt(seed))
    return int.from_bytes(digest.digest(), "little")


def _salt(seed: int) -> bytes:
    return (seed % 2**128).to_bytes(16, "little")


def uniforms(keys_B: NDArray[np.uint64], counters_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return the `counter`-th number in [0, 1) of each key's stream: SplitMix64, upper 53 bits.

    Source: Steele, Lea & Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, fig. 16
    (variant 13 of the mixing function).
    """
    z_B = keys_B + (counters_B + np.uint64(1)) * _GOLDEN
    z_B = (z_B ^ (z_B >> np.uint64(30))) * _MIX_1
    z_B = (z_B ^ (z_B >> np.uint64(27))) * _MIX_2
    z_B = z_B ^ (z_B >> np.uint64(31))
    numbers_B: NDArray[np.float64] = (z_B >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers_B


def sample(
    logits_BV: Tensor,
    *,
    temperatures_B: Tensor,
    top_ps_B: Tensor | None,
    top_ks_B: Tensor | None,
    uniforms_B: Tensor,
    processed_B: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Draw one token per row.

    Args:
        logits_BV: [B, V] of any float type; the arithmetic is fp32, cumulative probabilities are float64.
        temperatures_B: [B] fp32; 0 takes the most likely token.
        top_ps_B, top_ks_B: [B] truncation (1.0 and 0 keep everything), or None if no row truncates.
        uniforms_B: [B] float64 in [0, 1).
        processed_B: [B] bool: rows whose log-probs are taken after truncation; None: no row's.

    Returns:
        [B] token ids; [B] their log-probs under softmax(logits / temperature) before truncation
        (temperature 0: under softmax(logits)), or after it, renormalised; [B] float64 the probability that
        truncation kept, None if no row truncates. A row whose logits hold NaN or +inf has a NaN log-prob.
    """
    greedy_B = temperatures_B == 0.0
    logprobs_BV = tempered_logprobs(logits_BV, temperatures_B)
    probs_BV, mass_B = logprobs_BV.exp(), None
    if top_ps_B is not None and top_ks_B is not None:
        probs_BV = torch.where(truncation_mask(probs_BV, top_ps_B, top_ks_B), probs_BV, 0.0)
        mass_B = probs_BV.double().sum(dim=-1)
    tokens_B = inverse_cdf(probs_BV, uniforms_B)
    if bool(greedy_B.any()):
        tokens_B = torch.where(greedy_B, logprobs_BV.argmax(dim=-1), tokens_B)
    token_logprobs_B = logprobs_BV.gather(1, tokens_B[:, None])[:, 0]
    if processed_B is not None and mass_B is not None:
        token_logprobs_B = torch.where(
            processed_B & ~greedy_B, token_logprobs_B - mass_B.log().float(), token_logprobs_B
        )
    return tokens_B, token_logprobs_B, mass_B


def likeliest(
    logits_BV: Tensor, *, temperatures_B: Tensor, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """Return each row's `counts` most likely tokens as (id, log-prob), with the log-probs of `sample`."""
    most = min(max(counts), logits_BV.shape[1])
    logprobs_BK, ids_BK = tempered_logprobs(logits_BV, temperatures_B).topk(most, dim=-1)
    rows = zip(counts, ids_BK.tolist(), logprobs_BK.tolist(), strict=True)
    return [tuple(zip(ids[:k], logprobs[:k], strict=True)) for k, ids, logprobs in rows]


def tempered_logprobs(logits_BV: Tensor, temperatures_B: Tensor) -> Tensor:
    """[B, V] fp32 log softmax(logits / temperature), or of the plain logits at temperature 0."""
    divisors_B = torch.where(temperatures_B == 0.0, 1.0, temperatures_B)
    return torch.log_softmax(logits_BV.float() / divisors_B[:, None], dim=-1)


def inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """[B] the first token whose cumulative probability exceeds uniform * total.

    Never one of probability 0.
    """
    cdf_BV = probs_BV.double().cumsum(dim=-1)
    total_B = cdf_BV[:, -1]
    # uniform * total may round up to total itself, which no token's sum exceeds.
    below_total_B = torch.nextafter(total_B, torch.zeros_like(total_B))
    threshold_B = torch.minimum(uniforms_B * total_B, below_total_B)
    tokens_B1 = torch.searchsorted(cdf_BV, threshold_B[:, None], right=True)
    # Only a row of NaN can point beyond the vocabulary; its NaN log-prob informs the caller.
    return tokens_B1[:, 0].clamp(max=probs_BV.shape[1] - 1)


def truncation_mask(probs_BV: Tensor, top_ps_B: Tensor, top_ks_B: Tensor) -> Tensor:
    """[B, V] True for the tokens that top_k and then top_p keep; the most likely one always stays.

    top_p keeps the smallest set of the likeliest tokens whose mass, after top_k, reaches top_p.
    """
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    in_top_k_BV = (ranks_V < top_ks_B[:, None]) | (top_ks_B[:, None] == 0)
    sorted_BV = torch.where(in_top_k_BV, sorted_BV, 0.0).double()
    mass_before_BV = sorted_BV.cumsum(dim=-1) - sorted_BV
    target_B1 = top_ps_B[:, None].double() * sorted_BV.sum(dim=-1, keepdim=True)
    # top_p = 1 must keep everything, even if the rounded sum reaches 1 before the last token.
    in_top_p_BV = (mass_before_BV < target_B1) | (top_ps_B[:, None] >= 1.0)
    mask_BV = in_top_k_BV & in_top_p_BV
    mask_BV[:, 0] = True
    return torch.zeros_like(mask_BV).scatter(1, order_BV, mask_BV)
