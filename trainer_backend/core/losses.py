"""Policy losses over sampled tokens.

Each loss is a sum with the token weights of `core.aggregation`, so the losses of micro-batches sum to that of
the step. This file calls methods of tensors and does not import torch, because the orchestrator process reads
LOSSES without torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from trainer_backend.core.keys import Table

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is 5e8. Without a limit, a ratio could be infinite, and inf * 0 would be NaN in the gradient.
LOG_RATIO_LIMIT = 20.0


class RangeKeys(Table):
    """Job keys of the clip range of probability ratios, [1 - clip_low, 1 + clip_high]."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """ratios are clipped below 1 - clip_low; if clip_low is 1, low ratios are not clipped"""
    clip_high: float = Field(default=0.25, gt=0)
    """ratios are clipped above 1 + clip_high"""


class ClipKeys(RangeKeys):
    """Job keys of `clipped_policy_loss`."""

    clip_dual: float | None = Field(default=None, gt=1)
    """a token with a negative advantage has no gradient if its ratio is above this; absent: no limit"""

    @model_validator(mode="after")
    def _dual_is_beyond(self) -> Self:
        if self.clip_dual is not None and self.clip_dual <= 1.0 + self.clip_high:
            raise ValueError(
                f"clip_dual ({self.clip_dual}) must be above 1 + clip_high ({1.0 + self.clip_high:g})"
            )
        return self


class SapoKeys(Table):
    """Job keys of `sapo_loss`, which has no clip range."""

    tau_pos: float = Field(default=1.0, gt=0)
    """sapo: how fast a gradient fades as its ratio leaves 1, for positive advantages"""
    tau_neg: float = Field(default=1.05, gt=0)
    """sapo: how fast a gradient fades as its ratio leaves 1, for negative advantages"""


# (log-probs, proximal log-probs, advantages, weights, keys of the loss) -> loss.
PolicyLoss = Callable[["Tensor", "Tensor", "Tensor", "Tensor", Any], "Tensor"]
RatioLevel = Literal["token", "decision", "episode"]


@dataclass(frozen=True, slots=True)
class LossPlug:
    """A loss that a job can select by name."""

    compute: PolicyLoss
    keys: type[Table] = Table
    """Class of the job keys that the loss reads. Keys that `[training]` does not define are read from
    `[training.NAME]`."""
    values: Mapping[str, float | bool | str] = field(default_factory=dict)
    """Defaults from its paper: dotted job key -> value. Values that the job sets take precedence."""

    @property
    def clips(self) -> bool:
        """Whether the loss keeps probability ratios near 1. Losses that read job keys do; others do not."""
        return bool(self.keys.model_fields)


def clipped_policy_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: ClipKeys
) -> Tensor:
    """Compute the negated clipped surrogate of PPO, as a weighted sum over tokens.

        ratio = exp(logprobs - proximal_logprobs)
        loss  = -sum(w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    With clip_dual = c, the term of a token with A < 0 is max(c * A, min(...) as above).

    Args:
        logprobs: log-probs (nats) under the policy in training. All four tensors have the same shape, usually
            [N].
        proximal_logprobs: log-probs (nats) in the denominator of the ratio, usually under the learner's
            weights before the iteration's first update; no gradient.
        advantages: in reward units.
        weights: weights of `core.aggregation` times those of `core.behaviour`. A token of weight 0 is
            padding: its other values, even NaN, affect neither loss nor gradient.
        keys: the clip range.

    Returns:
        Scalar, in reward units.

    Source: Schulman et al., PPO, arXiv:1707.06347, eq. 7; two-sided range: DAPO, arXiv:2503.14476, eq. 10;
    dual clip: Ye et al., arXiv:1912.09729, eq. 5 (off by default here; 3 in verl).
    """
    # Mask before exp(): a NaN on a padded token would survive a mask applied afterwards, in the gradient.
    ratio = log_ratio(logprobs, proximal_logprobs, weights).exp()
    clipped = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high)
    masked_advantages = _masked(advantages, weights)
    surrogate = (ratio * masked_advantages).minimum(clipped * masked_advantages)
    if keys.clip_dual is not None:
        bound = keys.clip_dual * masked_advantages
        surrogate = surrogate.maximum(bound).where(masked_advantages < 0, surrogate)
    return -weighted_sum(surrogate, weights)


def cispo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: RangeKeys
) -> Tensor:
    """Compute the CISPO loss: the policy gradient, weighted by clipped ratios. Every token has a gradient.

        loss = -sum(w * stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob)

    Arguments and result as in `clipped_policy_loss`, but clip_dual is not read. With clip_low = 1 only high
    ratios are clipped, as in the paper.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5, with equal token weights and no lower bound; the paper
    does not state the upper bound. ScaleRL, arXiv:2510.13786, uses an upper bound of about 5: clip_high = 4.
    """
    ratio = log_ratio(logprobs, proximal_logprobs, weights).exp().detach()
    clipped = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high)
    return -weighted_sum(clipped * _masked(advantages, weights) * _masked(logprobs, weights), weights)


def sapo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: SapoKeys
) -> Tensor:
    """Compute the SAPO loss: gradients fade gradually as a ratio moves away from 1, and never become 0.

        loss     = -sum(w * gate(ratio) * A)
        gate(r)  = 4 / tau * sigmoid(tau * (r - 1)),     tau = tau_pos where A > 0, else tau_neg
        gradient = -w * 4 p (1 - p) * ratio * A of each logprob,     p = sigmoid(tau * (ratio - 1))

    At ratio 1 the gradient is the policy gradient for every tau. A higher tau makes the gradient fade faster.
    In the paper tau_neg is higher than tau_pos, because lowering the probability of one token raises those of
    all other tokens. Arguments and result as in `clipped_policy_loss`.

    Source: Gao et al., SAPO, arXiv:2511.20347, eq. 5 to 8. The paper weights sequences equally; its sequence
    is a decision here. TRL (`loss_type = "sapo"`) has the same term and the same two temperatures.
    """
    ratio = log_ratio(logprobs, proximal_logprobs, weights).exp()
    masked_advantages = _masked(advantages, weights)
    gate = _soft_gate(ratio, keys.tau_pos).where(masked_advantages > 0, _soft_gate(ratio, keys.tau_neg))
    return -weighted_sum(gate * masked_advantages, weights)


def _soft_gate(ratio: Tensor, tau: float) -> Tensor:
    return (tau * (ratio - 1.0)).sigmoid() * (4.0 / tau)


def policy_gradient_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: Table
) -> Tensor:
    """Compute the negated plain policy gradient: -sum(w * A * logprob).

    Proximal log-probs and keys are not read, so nothing corrects for the change of the policy within an
    iteration: the gradient is exact only in the first step. Arguments and result as in `clipped_policy_loss`.

    Source: Williams, REINFORCE, 1992.
    """
    return -weighted_sum(_masked(advantages, weights) * _masked(logprobs, weights), weights)


def level_ratios(means: Tensor, logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Return log-probs with which a loss computes one probability ratio per unit (`algorithm.ratio_level`).

        log s_u = mean of (logprob - proximal) over the tokens of unit u
        result  = proximal + log s_u + (logprob - stop_gradient(logprob))

    Pass the result to a loss in place of `logprobs`. The ratio of every token is then the ratio s_u of its
    unit, with the gradient of the token's own log-prob. If the tokens of a unit have equal weights that sum
    to 1, their gradients sum to the gradient of s_u. With the clipped loss and decisions as units this is
    GSPO. `means` contains log s_u of each token's unit, from `unit_means`. All tensors have the same shape.

    Source: Zheng et al., GSPO, arXiv:2507.18071, eq. 7 (sequence ratio) and 14 (gradient per token). The
    paper clips at 3e-4 and 4e-4 (section 5.1) and weights sequences equally; its sequence is a decision here.
    """
    return attach_gradient(logprobs, proximal_logprobs + means)


def attach_gradient(logprobs: Tensor, values: Tensor) -> Tensor:
    """Return a tensor that equals `values` and has the gradient of `logprobs`."""
    return values + (logprobs - logprobs.detach())


def unit_means(units: Tensor, log_ratios: Tensor, weights: Tensor) -> Tensor:
    """Compute the mean log-ratio over each token's unit, [N], without gradient.

    `units` (int64) contains the number of each token's unit; all tokens of a unit must be present.
    `log_ratios` (nats) is a result of `log_ratio`. Tokens of weight 0 are left out of the mean.
    """
    counted = (weights != 0).to(log_ratios.dtype)
    sums = counted.new_zeros(int(units.max()) + 1)
    tokens = sums.index_add(0, units, counted).clamp(min=1.0)
    return (sums.index_add(0, units, log_ratios.detach() * counted) / tokens)[units]


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, weights: Tensor) -> Tensor:
    """Compute logprobs - other_logprobs (nats), clamped to +-LOG_RATIO_LIMIT; 0 where the weight is 0."""
    difference = (logprobs - other_logprobs).where(weights != 0, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _masked(values: Tensor, weights: Tensor) -> Tensor:
    """Set values to 0 where the weight is 0, before any product: NaN * 0 is NaN, in gradients too."""
    return values.where(weights != 0, 0.0)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """Compute sum(w * value) over tokens of weight other than 0; a scalar in the unit of the values."""
    return (_masked(values, weights) * weights).sum()


def entropy_loss(entropies: Tensor, weights: Tensor) -> Tensor:
    """Compute -sum(w * H), in nats, for entropies H. Minimising it raises the policy's entropy.

    Source: Mnih et al., A3C, arXiv:1602.01783, section 4.
    """
    return -weighted_sum(entropies, weights)


LOSSES: dict[str, LossPlug] = {
    "clipped": LossPlug(clipped_policy_loss, ClipKeys),
    # arXiv:2503.14476, sections 2.3 and 3.1 to 3.3; refill_rounds: verl's recipe samples at most ten batches.
    "dapo": LossPlug(
        clipped_policy_loss,
        ClipKeys,
        values={
            "training.clip_low": 0.2,
            "training.clip_high": 0.28,
            "training.aggregation": "token_mean",
            "training.skip_flat_groups": True,
            "training.refill_rounds": 9,
            "training.kl_coef": 0.0,
            "training.entropy_coef": 0.0,
        },
    ),
    "gspo": LossPlug(
        clipped_policy_loss,
        ClipKeys,
        values={
            "algorithm.ratio_level": "decision",
            "training.clip_low": 3e-4,
            "training.clip_high": 4e-4,
            "training.aggregation": "decision_mean",
        },
    ),
    "cispo": LossPlug(
        cispo_loss,
        RangeKeys,
        values={"training.clip_low": 1.0, "training.clip_high": 4.0, "training.aggregation": "token_mean"},
    ),
    "sapo": LossPlug(sapo_loss, SapoKeys, values={"training.aggregation": "decision_mean"}),
    "policy_gradient": LossPlug(policy_gradient_loss),
}
