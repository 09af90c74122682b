"""Behaviour weights: importance weights of tokens that another policy sampled.

    log w_u = sum over the tokens of unit u of (logprob - behaviour logprob)

A unit is a token, a decision or an episode (`number_units`). If the units are episodes and weights are not
truncated, the weighted gradient is exactly the policy gradient. If the units are tokens, the gradient is
biased, because the other policy also sampled the tokens before and after each token
(tests/trainer_backend/core/test_off_policy.py enumerates a small case). The sum runs over sampled tokens, not
over tokens of prompts, tool results and user messages.

This file calls methods of tensors and does not import torch, for the reason given in `core.losses`.
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
    """Keys that say how weights are truncated. Truncation bounds their variance at the cost of a bias."""

    behaviour_weight_cap: float = Field(default=2.0, ge=1)
    """upper bound of a behaviour weight, which is proximal probability / behaviour probability"""
    behaviour_weight_floor: float = Field(default=0.0, ge=0, le=1)
    """in mode mask, weights below this bound are also set to 0; mode truncate does not read this key"""
    behaviour_weight_level: RatioLevel = "token"
    """token: each token has its own weight; decision or episode: all tokens of a decision or of an episode
    have the same weight, the product of their token weights"""
    behaviour_weight_mode: WeightMode = "truncate"
    """truncate sets a weight above behaviour_weight_cap to the cap; mask sets it to 0"""


def behaviour_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None, keys: WeightKeys
) -> Tensor:
    """Compute the truncated importance weight of each token's unit, [N], in [0, cap], without gradient.

    The caller multiplies the token weights of the loss by the result. The sampler may be an older version of
    the policy or another model. A loss treats a token of weight 0 as padding. `logprobs` (nats) come from the
    target policy, `behaviour_logprobs` from the sampler. `units` is explained in `log_weights`.

    Source: Ionides, Truncated Importance Sampling, 2008; mask: IcePop, as verl's threshold "lo_hi"; DESIGN.md
    4.9, 4.10.
    """
    return truncated(log_weights(logprobs, behaviour_logprobs, units), keys)


def log_weights(logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None) -> Tensor:
    """Compute log w of each token's unit, [N], before truncation and without gradient.

    The result is at most LOG_RATIO_LIMIT. It has no lower limit: clamping from below would give all very
    unlikely units the same small weight. `units` contains the number of each token's unit; all tokens of a
    unit must be present. With `units` None, each token is a unit.
    """
    difference = (logprobs - behaviour_logprobs).detach()
    if units is not None:
        # In float64, because thousands of tokens are summed in an order that depends on the packing.
        sums = difference.new_zeros(int(units.max()) + 1).double()
        difference = sums.index_add(0, units, difference.double())[units].to(difference.dtype)
    return difference.clamp(max=LOG_RATIO_LIMIT)


def truncated(logs: Tensor, keys: WeightKeys) -> Tensor:
    """Compute the truncated weights, [N], in [0, cap], from the results of `log_weights`."""
    weights = logs.exp()
    if keys.behaviour_weight_mode == "mask":
        return weights.where(
            (weights >= keys.behaviour_weight_floor) & (weights <= keys.behaviour_weight_cap), 0.0
        )
    return weights.clamp(max=keys.behaviour_weight_cap)


def effective_share(weights: Sequence[float]) -> float:
    """Compute the effective sample size of n weighted samples, divided by n.

        (sum w)^2 / (n * sum w^2)

    The share is 1 if all weights are equal, even if they are small. It is 1/n if only one weight is above 0,
    and 0 if all weights are 0. It measures how unequal the weights are; `counted_share` also measures how
    large they are. Weights must not be negative.

    Source: Kish, Survey Sampling, 1965.
    """
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def counted_share(weights: Sequence[float]) -> float:
    """Compute the share of n weighted samples that counts: the effective share, but at most the mean weight.

        min(effective_share, mean w) = (sum w)^2 / (n * max(sum w^2, sum w))

    The samples count as much as n * share samples of weight 1. If all weights are w, the share is min(w, 1).
    """
    return min(effective_share(weights), math.fsum(weights) / len(weights))
