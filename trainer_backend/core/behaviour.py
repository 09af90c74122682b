"""Behaviour weights: importance weights of tokens that another policy sampled.

    log w_u = sum over the tokens of unit u of (logprob - behaviour logprob)

A unit is a token, a decision or an episode (`number_units`). With untruncated weights of whole episodes, the
weighted gradient is the policy gradient. With token weights it is not, because the other policy also sampled
the tokens before and after (tests/trainer_backend/core/test_off_policy.py enumerates a small case). Only
sampled tokens enter weights, not the texts of prompts, tools and users.

This file uses only methods of tensors: see `core.losses`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.core.losses import LOG_RATIO_LIMIT, RatioLevel

if TYPE_CHECKING:
    from torch import Tensor

WeightMode = Literal["truncate", "mask"]


class WeightKeys(Table):
    """Keys of the truncation of weights, which bounds their variance at the cost of a bias."""

    behaviour_weight_cap: float = Field(default=2.0, ge=1)
    """upper bound of the weight proximal / behaviour"""
    behaviour_weight_floor: float = Field(default=0.0, ge=0, le=1)
    """mask: weights below this are set to 0 too; truncate does not read this key"""
    behaviour_weight_level: RatioLevel = "token"
    """whose weight a token has: its own, or the product over its decision or its episode"""
    behaviour_weight_mode: WeightMode = "truncate"
    """a weight above behaviour_weight_cap is set to the cap, or to 0 (mask)"""


def behaviour_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None, keys: WeightKeys
) -> Tensor:
    """Compute the importance weight of each token's unit, [N], in [0, cap], without gradient.

    The loss's weights are multiplied by it, whether the sampler is an older version of the policy or another
    model. A loss treats a token of weight 0 as padding. `logprobs` (nats) are those of the target policy,
    `behaviour_logprobs` those of the sampler; `units` as in `log_weights`.

    Source: Ionides, Truncated Importance Sampling, 2008; mask: IcePop, as verl's threshold "lo_hi"; DESIGN.md
    4.9, 4.10.
    """
    return truncated(log_weights(logprobs, behaviour_logprobs, units), keys)


def log_weights(logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None) -> Tensor:
    """Compute log w of each token's unit, [N], before truncation, at most LOG_RATIO_LIMIT; no gradient.

    There is no lower limit, which would give all distant units the same small weight. `units` has the number
    of each token's unit; all tokens of a unit must be present. None: each token is a unit.
    """
    difference = (logprobs - behaviour_logprobs).detach()
    if units is not None:
        # In float64, because thousands of tokens are summed in an order that depends on the packing.
        sums = difference.new_zeros(int(units.max()) + 1).double()
        difference = sums.index_add(0, units, difference.double())[units].to(difference.dtype)
    return difference.clamp(max=LOG_RATIO_LIMIT)


def truncated(logs: Tensor, keys: WeightKeys) -> Tensor:
    """Compute the truncated weights, [N], in [0, cap], from their logs."""
    weights = logs.exp()
    if keys.behaviour_weight_mode == "mask":
        return weights.where(
            (weights >= keys.behaviour_weight_floor) & (weights <= keys.behaviour_weight_cap), 0.0
        )
    return weights.clamp(max=keys.behaviour_weight_cap)


def effective_share(weights: Sequence[float]) -> float:
    """Compute the effective sample size as a share of the samples.

        (sum w)^2 / (n * sum w^2)

    1 if all weights are equal, even if small; 1/n if only one sample has a weight, 0 if none has. It measures
    how unequal weights are; `counted_share` also measures how large. Weights are at least 0.

    Source: Kish, Survey Sampling, 1965.
    """
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def counted_share(weights: Sequence[float]) -> float:
    """Compute how many samples of weight 1 the weighted samples are worth, as a share of their number.

        min(effective_share, mean w) = (sum w)^2 / (n * max(sum w^2, sum w))

    For equal weights w the share is min(w, 1).
    """
    return min(effective_share(weights), math.fsum(weights) / len(weights))
