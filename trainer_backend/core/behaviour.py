"""Behaviour weights: how much a token counts that another policy sampled.

    log w_u = sum over the tokens of unit u of (logprob - behaviour logprob)

A unit is a token, a decision or an episode (`number_units`). With the weight of whole episodes, before any
truncation, the weighted gradient is the policy gradient. With token weights it is not: the other policy
sampled what came before and after the token too (tests/trainer_backend/core/test_off_policy.py enumerates a
small case). These columns hold sampled tokens only, so what prompts, tools and users say enters no weight.

Tensor methods only: see `core.losses`.
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
    """How weights far from 1 are truncated: a bias that bounds their variance."""

    behaviour_weight_cap: float = Field(default=2.0, ge=1)
    """truncation of proximal / behaviour"""
    behaviour_weight_floor: float = Field(default=0.0, ge=0, le=1)
    """mask: smaller weights are set to 0 too; truncate does not read it"""
    behaviour_weight_level: RatioLevel = "token"
    """a token's weight: its own, its decision's or its episode's (products)"""
    behaviour_weight_mode: WeightMode = "truncate"
    """a weight above behaviour_weight_cap is set to the cap, or to 0 (mask)"""


def behaviour_weights(
    logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None, keys: WeightKeys
) -> Tensor:
    """[N] importance weight of each token's unit, in [0, cap], without gradient.

    It multiplies the weights of a loss, whether the sampler is an older version of the policy or another
    model. To a loss, a token of weight 0 is padding. `logprobs` (nats) are those of the policy that the
    samples stand for, `behaviour_logprobs` those of the sampler; `units` as in `log_weights`.

    Source: Ionides, Truncated Importance Sampling, 2008; mask: IcePop, as verl's threshold "lo_hi"; DESIGN.md
    4.9, 4.10.
    """
    return truncated(log_weights(logprobs, behaviour_logprobs, units), keys)


def log_weights(logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None) -> Tensor:
    """[N] log w of each token's unit before truncation, at most LOG_RATIO_LIMIT; no gradient.

    There is no lower limit: it would give all distant units the same small weight, as if they counted alike.
    `units` are equal for tokens of one unit, all of which must be here; None: each token is its own unit.
    """
    difference = (logprobs - behaviour_logprobs).detach()
    if units is not None:
        # In float64: thousands of tokens are summed, and in whichever order they were packed.
        sums = difference.new_zeros(int(units.max()) + 1).double()
        difference = sums.index_add(0, units, difference.double())[units].to(difference.dtype)
    return difference.clamp(max=LOG_RATIO_LIMIT)


def truncated(logs: Tensor, keys: WeightKeys) -> Tensor:
    """[N] weights from their logs, in [0, cap]."""
    weights = logs.exp()
    if keys.behaviour_weight_mode == "mask":
        return weights.where(
            (weights >= keys.behaviour_weight_floor) & (weights <= keys.behaviour_weight_cap), 0.0
        )
    return weights.clamp(max=keys.behaviour_weight_cap)


def effective_share(weights: Sequence[float]) -> float:
    """The effective sample size as a share of the samples.

        (sum w)^2 / (n * sum w^2)

    1 where all weights are equal, however small; 1/n where a single sample counts, 0 where none does. It
    measures how unequal weights are, `counted_share` also how large. Weights are at least 0.

    Source: Kish, Survey Sampling, 1965.
    """
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def counted_share(weights: Sequence[float]) -> float:
    """How many of the actor's own samples, of weight 1, these are worth, as a share of their number.

        min(effective_share, mean w) = (sum w)^2 / (n * max(sum w^2, sum w))

    Of equal weights w it is min(w, 1): samples that all weigh 0.001 count as a thousandth.
    """
    return min(effective_share(weights), math.fsum(weights) / len(weights))
