"""Sample tokens from logits by pure functions over a batch, with counter-based random numbers.

Each request has its own stream of random numbers, and its i-th token uses the i-th number of this stream. So
the sampled tokens depend neither on the other requests of a batch nor on the order in which requests arrive.
"""

import hashlib
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import NamedTuple, Self

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from shared_schemas.trajectory import Sampling, SamplingKeys

# The names of the sampling options, a function that reads their values from a `Sampling`, and the values that
# have no effect.
OPTIONS = tuple(SamplingKeys.model_fields)
TEMPERATURE = OPTIONS.index("temperature")
read_options = attrgetter(*OPTIONS)
PLAIN_OPTIONS: tuple[float, ...] = read_options(Sampling())
# The number of tokens in a block of `inverse_cdf`.
BLOCK = 64
# The largest vocabulary that `inverse_cdf` cumulates without blocks, which is faster for few tokens.
AT_ONCE = 16 * BLOCK
# The largest number that `uniforms` returns. A positive float64 multiplied by it becomes the next smaller
# float64.
BELOW_ONE = 1.0 - 2.0**-53
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def stream_key(seed: int, prompt_ids: Sequence[int]) -> int:
    """Return the 64-bit key of a request's random stream, from its seed and its prompt.

    The key includes the prompt because an episode may send the same seed with each of its model calls. With
    the seed alone, all these calls would draw the same random numbers, so their samples would be correlated.
    """
    salt = (seed % 2**128).to_bytes(16, "little")
    digest = hashlib.blake2b(array("q", prompt_ids).tobytes(), digest_size=8, salt=salt)
    return int.from_bytes(digest.digest(), "little")


def uniforms(keys_B: NDArray[np.uint64], counters_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return one number in [0, 1) per row: the number at index `counters_B` in the stream of `keys_B`.

    A number is made of the upper 53 bits that SplitMix64 generates.

    Source: Steele, Lea & Flood, Fast Splittable Pseudorandom Number Generators, OOPSLA 2014, fig. 16
    (variant 13 of the mixing function).
    """
    z_B = keys_B + (counters_B + np.uint64(1)) * _GOLDEN
    z_B = (z_B ^ (z_B >> np.uint64(30))) * _MIX_1
    z_B = (z_B ^ (z_B >> np.uint64(27))) * _MIX_2
    z_B = z_B ^ (z_B >> np.uint64(31))
    numbers_B: NDArray[np.float64] = (z_B >> np.uint64(11)).astype(np.float64) * 2.0**-53
    return numbers_B


@dataclass(frozen=True, slots=True)
class RowSettings:
    """The sampling settings of B rows. A setting that no row needs may be None, to save time."""

    temperatures_B: Tensor | None = None  # [B] fp32; greedy rows have 1
    greedy_B: Tensor | None = None  # [B] bool: rows that take the most likely token
    truncation: Mapping[str, Tensor] | None = None  # name of an option: its values, [B] fp32
    processed_B: Tensor | None = None  # [B] bool: rows whose log-probs are taken after truncation

    @classmethod
    def of(cls, options_BN: Tensor, processed_B: Tensor | None) -> Self:
        """Build settings without reading from the device.

        The columns of `options_BN` are the OPTIONS. `processed_B` is None if no row truncates.
        """
        options = dict(zip(OPTIONS, options_BN.float().unbind(1), strict=True))
        greedy_B = options["temperature"] == 0.0
        temperatures_B = torch.where(greedy_B, 1.0, options["temperature"])
        return cls(temperatures_B, greedy_B, None if processed_B is None else options, processed_B)

    @classmethod
    def lean(
        cls, options_BN: NDArray[np.float64], processed_B: NDArray[np.bool_] | None, *, device: torch.device
    ) -> Self:
        """Build settings like `of`, from arrays; tensors that no row needs are left out."""
        processed = None if processed_B is None else torch.tensor(processed_B, device=device)
        settings = cls.of(torch.tensor(options_BN, device=device), processed)
        temperatures = set(options_BN[:, TEMPERATURE].tolist())
        return replace(
            settings,
            temperatures_B=settings.temperatures_B if temperatures - {0.0, 1.0} else None,
            greedy_B=settings.greedy_B if 0.0 in temperatures else None,
        )


class Draw(NamedTuple):
    """One sampled token of each row."""

    tokens_B: Tensor
    """[B] int64 ids."""
    logprobs_B: Tensor
    """[B] fp32 log-probs under softmax(logits / temperature), where a greedy row has temperature 1. They are
    taken before truncation or, for rows of `processed_B`, after truncation and renormalised. NaN if the
    logits contain NaN or +inf."""
    mass_B: Tensor | None
    """[B] float64: the probability mass that truncation kept; None if no row truncates."""


def sample(logits_BV: Tensor, settings: RowSettings, uniforms_B: Tensor) -> Draw:
    """Draw one token per row, without reading from the device.

    `logits_BV` may have any float type; the arithmetic is fp32. `uniforms_B` are float64 in [0, BELOW_ONE].
    """
    tempered_BV = tempered(logits_BV, settings.temperatures_B)
    probs_BV, mass_B = tempered_BV.softmax(dim=-1), None
    kept_BV = probs_BV
    if settings.truncation is not None:
        mask_BV = truncation_mask(probs_BV, settings.truncation)
        kept_BV = torch.where(mask_BV, probs_BV, 0.0)
        mass_B = kept_BV.sum(dim=-1, dtype=torch.float64)
    tokens_B = inverse_cdf(kept_BV, uniforms_B)
    if settings.greedy_B is not None:
        tokens_B = torch.where(settings.greedy_B, tempered_BV.argmax(dim=-1), tokens_B)
    logprobs_B = _gather_logprobs(tokens_B[:, None], tempered_BV, probs_BV)[:, 0]
    if settings.processed_B is not None and mass_B is not None:
        logprobs_B = torch.where(settings.processed_B, logprobs_B - mass_B.log().float(), logprobs_B)
    return Draw(tokens_B, logprobs_B, mass_B)


def likeliest(
    logits_BV: Tensor, settings: RowSettings, *, counts: Sequence[int]
) -> list[tuple[tuple[int, float], ...]]:
    """Return each row's `counts` most likely tokens as (id, log-prob before truncation)."""
    tempered_BV = tempered(logits_BV, settings.temperatures_B)
    ids_BK = tempered_BV.topk(min(max(counts), logits_BV.shape[1]), dim=-1).indices
    logprobs_BK = _gather_logprobs(ids_BK, tempered_BV, tempered_BV.softmax(dim=-1))
    rows = zip(counts, ids_BK.tolist(), logprobs_BK.tolist(), strict=True)
    return [tuple(zip(ids[:k], logprobs[:k], strict=True)) for k, ids, logprobs in rows]


def tempered(logits_BV: Tensor, temperatures_B: Tensor | None) -> Tensor:
    """Return logits / temperature in fp32, [B, V]."""
    logits_BV = logits_BV.float()
    return logits_BV if temperatures_B is None else logits_BV / temperatures_B[:, None]


def _gather_logprobs(tokens_BK: Tensor, tempered_BV: Tensor, probs_BV: Tensor) -> Tensor:
    """Return the log-probs of `tokens_BK`, computed from the distances of their logits to the highest logit.

    The logarithm of `probs_BV` is not used, because it is -inf where a probability underflows in fp32.
    """
    highest_B1 = tempered_BV.amax(dim=-1, keepdim=True)
    return tempered_BV.gather(1, tokens_BK) - highest_B1 + probs_BV.amax(dim=-1, keepdim=True).log()


def inverse_cdf(probs_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Return the first token whose cumulative probability exceeds uniform * total, [B].

    The returned token never has probability 0. A vocabulary of at most AT_ONCE tokens is cumulated in
    float64. A larger vocabulary is searched in two levels: first a block of BLOCK tokens, then a token in the
    block. Blocks are summed in fp32, and the sums are cumulated in float64. This needs no [B, V] float64
    tensor, and changes a token's probability by at most 1e-7 of its block's probability.
    """
    vocabulary = probs_BV.shape[1]
    if vocabulary <= AT_ONCE:
        cdf_BV = probs_BV.double().cumsum(dim=-1)
        return _first_above(uniforms_B[:, None] * cdf_BV[:, -1:], cdf_BV)[:, 0]
    blocks_BNK = _blocks(probs_BV)
    sums_BN = blocks_BNK.sum(dim=-1).double()
    cdf_BN = sums_BN.cumsum(dim=-1)
    threshold_B1 = uniforms_B[:, None] * cdf_BN[:, -1:]
    block_B1 = _first_above(threshold_B1, cdf_BN)
    rest_B1 = threshold_B1 - (cdf_BN.gather(1, block_B1) - sums_BN.gather(1, block_B1))
    block_B1K = blocks_BNK.gather(1, block_B1[:, :, None].expand(-1, 1, BLOCK))
    cdf_BK = block_B1K[:, 0].double().cumsum(dim=-1)
    # The block's fp32 sum may exceed its float64 sum, and so may the rest of the threshold.
    rest_B1 = torch.minimum(rest_B1.clamp_(min=0.0), cdf_BK[:, -1:] * BELOW_ONE)
    tokens_B1 = _first_above(rest_B1, cdf_BK).add_(block_B1, alpha=BLOCK)
    return tokens_B1[:, 0].clamp_(max=vocabulary - 1)


def _first_above(threshold_B1: Tensor, cdf_BN: Tensor) -> Tensor:
    """Return for each row the index of the first number above the row's threshold, [B, 1].

    Such a number exists, because uniforms are at most BELOW_ONE. For a row of NaN, the result is the last
    index, and the caller recognises the row by its NaN log-prob.
    """
    return torch.searchsorted(cdf_BN, threshold_B1, right=True).clamp_(max=cdf_BN.shape[1] - 1)


def truncation_mask(probs_BV: Tensor, options: Mapping[str, Tensor]) -> Tensor:
    """Return a mask [B, V] of the tokens that remain after top_k, min_p and top_p, in this order.

    The most likely token always remains. min_p keeps tokens with at least min_p times the largest probability
    (Nguyen et al., arXiv:2407.01082). top_p keeps the smallest set of the likeliest remaining tokens whose
    share of the remaining mass reaches top_p. The mass is cumulated as in `inverse_cdf`, with an error of at
    most 1e-7 of a block's mass. `options` maps each option's name to its values, [B] in fp32, which is exact
    for every top_k.
    """
    top_ps_B, top_ks_B, min_ps_B = options["top_p"], options["top_k"], options["min_p"]
    sorted_BV, order_BV = probs_BV.sort(dim=-1, descending=True, stable=True)
    ranks_V = torch.arange(probs_BV.shape[1], device=probs_BV.device)
    among_BV = (ranks_V < top_ks_B[:, None]) | (top_ks_B[:, None] == 0)
    among_BV &= sorted_BV >= min_ps_B[:, None] * sorted_BV[:, :1]
    blocks_BNK = _blocks(torch.where(among_BV, sorted_BV, 0.0))
    sums_BN = blocks_BNK.sum(dim=-1, dtype=torch.float64)
    cdf_BN = sums_BN.cumsum(dim=-1)
    # The mass that the target still lacks at the beginning of each block. float32 suffices, since it is
    # compared only within the block.
    left_BN = (top_ps_B[:, None].double() * cdf_BN[:, -1:] - (cdf_BN - sums_BN)).float()
    in_top_p_BV = (blocks_BNK.cumsum(dim=-1) - blocks_BNK < left_BN[:, :, None]).flatten(1)[:, : len(ranks_V)]
    # top_p = 1 must keep everything, even if the rounded sum reaches 1 before the last token.
    mask_BV = among_BV & (in_top_p_BV | (top_ps_B[:, None] >= 1.0))
    mask_BV[:, 0] = True
    return torch.zeros_like(mask_BV).scatter(1, order_BV, mask_BV)


def _blocks(probs_BV: Tensor) -> Tensor:
    """Return the probabilities in blocks, [B, N, BLOCK]; zeros fill up the last block."""
    missing = -probs_BV.shape[1] % BLOCK
    return (F.pad(probs_BV, (0, missing)) if missing else probs_BV).view(len(probs_BV), -1, BLOCK)
