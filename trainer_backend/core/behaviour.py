"""Behaviour weights: how much a token counts that another policy sampled than the one that is trained.

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
    """What becomes of weights that are far from 1: a bias that bounds their variance."""

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
    """[N] how much likelier a policy finds each token's unit than its sampler did, in [0, cap]; no gradient.

    It multiplies the weights of a loss, whether the sampler is an older version of the policy or another
    model. A token whose weight is 0 is padding to every loss. The log-probs (nats) are those of the policy
    that the samples are to stand for, and of the policy that sampled them, as it sampled; `units` as in
    `log_weights`; `keys` truncate.

    Source: Ionides, Truncated Importance Sampling, 2008; mask: IcePop, as verl's threshold "lo_hi"; DESIGN.md
    4.9, 4.10.
    """
    return truncated(log_weights(logprobs, behaviour_logprobs, units), keys)


def log_weights(logprobs: Tensor, behaviour_logprobs: Tensor, units: Tensor | None) -> Tensor:
    """[N] log w of each token's unit, before truncation, LOG_RATIO_LIMIT at most; no gradient.

    Nothing holds it from below: units that are far away would all get the same small weight, and pass for
    samples that count alike. `units` are equal for tokens of one unit, whose tokens have to be here all
    together; None: each by itself.
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

    1 where all weigh the same, however little; 1/n where one alone counts, 0 where none does. It tells how
    unequal weights are, and `counted_share` how much they are. Weights are at least 0.

    Source: Kish, Survey Sampling, 1965.
    """
    squares = math.fsum(weight * weight for weight in weights)
    return math.fsum(weights) ** 2 / (len(weights) * squares) if squares else 0.0


def counted_share(weights: Sequence[float]) -> float:
    """How many samples of weight 1, the actor's own, these are worth, as a share of their number.

        min(effective_share, mean w) = (sum w)^2 / (n * max(sum w^2, sum w))

    Of equal weights w it is min(w, 1): samples that all weigh 0.001 count as a thousandth.
    """
    return min(effective_share(weights), math.fsum(weights) / len(weights))
