"""Losses over sampled tokens. Every sum is weighted by `core.aggregation`, so it adds up over any cut.

Tensor methods only: the plug board names these functions, and the orchestrator that reads it has no torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is 5e8: beyond it a ratio says only "far away", and inf * 0 would be a NaN in the gradient.
LOG_RATIO_LIMIT = 20.0


@dataclass(frozen=True, slots=True)
class LossConfig:
    """How far a ratio may move before its gradient stops: to [1 - clip_low, 1 + clip_high].

    Raises:
        ValueError: clip_low is outside [0, 1], or clip_high is negative.
    """

    clip_low: float = 0.2
    clip_high: float = 0.2

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0:
            raise ValueError(f"clip_low must lie in [0, 1], got {self.clip_low}")
        if not 0.0 <= self.clip_high < float("inf"):
            raise ValueError(f"clip_high must be finite and at least 0, got {self.clip_high}")


PolicyLoss = Callable[["Tensor", "Tensor", "Tensor", "Tensor", LossConfig], "Tensor"]


def clipped_policy_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, config: LossConfig
) -> Tensor:
    """The clipped surrogate of PPO, negated, as a weighted sum over tokens.

        ratio = exp(logprobs - proximal_logprobs)
        loss  = -sum(w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    Args:
        logprobs: of the policy in training (nats); [N], or any shape that the other three share.
        proximal_logprobs: of the same learner before the step; no gradient.
        advantages: of the decision that sampled the token, in reward units.
        weights: of `core.aggregation`, times any truncated behaviour weight. Where it is 0 the token is
            padding: whatever else stands there, NaN included, touches neither loss nor gradient.
        config: the clip range.

    Returns:
        Scalar, in reward units.

    Source: Schulman et al., PPO, arXiv:1707.06347, eq. 7; two-sided range: DAPO, arXiv:2503.14476, eq. 10.
    """
    # Mask before exp(): a NaN on a padded token would survive a mask applied afterwards, in the gradient.
    ratio = log_ratio(logprobs, proximal_logprobs, weights).exp()
    clipped = ratio.clamp(1.0 - config.clip_low, 1.0 + config.clip_high)
    masked_advantages = advantages.where(weights != 0, 0.0)
    surrogate = (ratio * masked_advantages).minimum(clipped * masked_advantages)
    return -weighted_sum(surrogate, weights)


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, weights: Tensor) -> Tensor:
    """logprobs - other_logprobs (nats), within +-LOG_RATIO_LIMIT; 0 where the weight is 0."""
    difference = (logprobs - other_logprobs).where(weights != 0, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(w * value) over tokens whose weight is not 0; a scalar in the unit of the values."""
    return (values.where(weights != 0, 0.0) * weights).sum()


def entropy_loss(entropies: Tensor, weights: Tensor) -> Tensor:
    """-sum(w * H): to be added times a coefficient, so that the policy stays spread out (nats).

    Source: Mnih et al., A3C, arXiv:1602.01783, section 4.
    """
    return -weighted_sum(entropies, weights)


def truncated_weights(proximal_logprobs: Tensor, behaviour_logprobs: Tensor, cap: float) -> Tensor:
    """min(cap, exp(proximal - behaviour)) without gradient: how much likelier the learner finds a token
    than its sampler did. It multiplies the weights of a loss; its truncation is a bias that bounds variance.

    Source: Ionides, Truncated Importance Sampling, 2008; DESIGN.md 4.9.
    """
    if not 0.0 < cap < float("inf"):
        raise ValueError(f"cap must be finite and above 0, got {cap}")
    difference = (proximal_logprobs - behaviour_logprobs).detach()
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp().clamp(max=cap)
