"""Losses over sampled tokens. Every sum is weighted by `core.aggregation`, so it adds up over any cut.

Tensor methods only: the plug board names these functions, and the orchestrator that reads it has no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Self

from pydantic import Field, model_validator

from trainer_backend.core.keys import Table

if TYPE_CHECKING:
    from torch import Tensor

# exp(20) is 5e8: beyond it a ratio says only "far away", and inf * 0 would be a NaN in the gradient.
LOG_RATIO_LIMIT = 20.0


class RangeKeys(Table):
    """How far a ratio may move before its gradient stops: to [1 - clip_low, 1 + clip_high]."""

    clip_low: float = Field(default=0.2, gt=0, le=1)
    """ratios are clipped below 1 - clip_low; at 1 none are"""
    clip_high: float = Field(default=0.25, gt=0)
    """ratios are clipped above 1 + clip_high"""


class ClipKeys(RangeKeys):
    """With clip_dual a token of negative advantage is also held once its ratio is above that."""

    clip_dual: float | None = Field(default=None, gt=1)
    """upper clip of ratios with a negative advantage"""

    @model_validator(mode="after")
    def _dual_is_beyond(self) -> Self:
        if self.clip_dual is not None and self.clip_dual <= 1.0 + self.clip_high:
            raise ValueError(
                f"clip_dual ({self.clip_dual}) must be above 1 + clip_high ({1.0 + self.clip_high:g})"
            )
        return self


class SapoKeys(Table):
    """Keys of `sapo_loss`, which has no range."""

    tau_pos: float = Field(default=1.0, gt=0)
    """sapo: how fast a gradient fades as its ratio leaves 1, for positive advantages"""
    tau_neg: float = Field(default=1.05, gt=0)
    """sapo: the same for negative advantages"""


# log-probs of the policy and of the proximal one, advantages, weights, and the keys of the plug.
PolicyLoss = Callable[["Tensor", "Tensor", "Tensor", "Tensor", Any], "Tensor"]
RatioLevel = Literal["token", "decision", "episode"]


@dataclass(frozen=True, slots=True)
class LossPlug:
    """A loss on the plug board."""

    compute: PolicyLoss
    keys: type[Table] = Table
    """What it reads of `[training]`; keys that [training] lacks stand in `[algorithm.NAME]`."""
    values: Mapping[str, float | bool | str] = field(default_factory=dict)
    """Defaults from its paper, by dotted key of the job; the job's own values win."""

    @property
    def clips(self) -> bool:
        """Whether it keeps a ratio near 1: only losses with keys do."""
        return bool(self.keys.model_fields)


def clipped_policy_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: ClipKeys
) -> Tensor:
    """The clipped surrogate of PPO, negated, as a weighted sum over tokens.

        ratio = exp(logprobs - proximal_logprobs)
        loss  = -sum(w * min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A))

    With clip_dual = c, where A < 0 the term is max(c * A, the one above).

    Args:
        logprobs: of the policy in training (nats); [N], or any shape that the other three share.
        proximal_logprobs: of the same learner before the step; no gradient.
        advantages: of the decision that sampled the token, in reward units.
        weights: of `core.aggregation`, times any of `core.behaviour`. Where it is 0 the token is padding:
            whatever else stands there, NaN included, touches neither loss nor gradient.
        keys: the clip range.

    Returns:
        Scalar, in reward units.

    Source: Schulman et al., PPO, arXiv:1707.06347, eq. 7; two-sided range: DAPO, arXiv:2503.14476, eq. 10;
    dual clip: Ye et al., arXiv:1912.09729, eq. 5. It is off by default here, and always on, at 3, in verl.
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
    """Policy gradient with a clipped ratio as its weight, negated: every token keeps a gradient.

        loss = -sum(w * stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * logprob)

    Arguments and result as in `clipped_policy_loss`; clip_dual is not read. With clip_low = 1 it clips above
    alone, as the paper does.

    Source: MiniMax-M1, arXiv:2506.13585, eq. 4 and 5: tokens count the same, no lower bound; it does not tell
    its upper one. ScaleRL, arXiv:2510.13786, holds ratios at about 5, which is clip_high = 4.
    """
    ratio = log_ratio(logprobs, proximal_logprobs, weights).exp().detach()
    clipped = ratio.clamp(1.0 - keys.clip_low, 1.0 + keys.clip_high)
    return -weighted_sum(clipped * _masked(advantages, weights) * _masked(logprobs, weights), weights)


def sapo_loss(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: SapoKeys
) -> Tensor:
    """A soft gate instead of the clip, negated: the gradient fades as a ratio leaves 1, but never stops.

        loss     = -sum(w * gate(ratio) * A)
        gate(r)  = 4 / tau * sigmoid(tau * (r - 1)),     tau = tau_pos where A > 0, else tau_neg
        gradient = -w * 4 p (1 - p) * ratio * A of each logprob,     p = sigmoid(tau * (ratio - 1))

    At ratio 1 that is the policy gradient for every tau. A higher tau fades faster; the paper lets tau_neg be
    the higher one, as what pushes a token down lifts all the others. Arguments and result as in
    `clipped_policy_loss`; of the keys only the taus are read.

    Source: Gao et al., SAPO, arXiv:2511.20347, eq. 5 to 8; it weighs sequences alike, which are a decision's
    tokens here. TRL (`loss_type = "sapo"`) has the same term and the same two temperatures.
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
    """The plain policy gradient, negated: -sum(w * A * logprob).

    Neither the proximal log-probs nor the keys are read, so nothing corrects for what earlier steps of the
    iteration changed: exact for the first step. Arguments and result as in `clipped_policy_loss`.

    Source: Williams, REINFORCE, 1992.
    """
    return -weighted_sum(_masked(advantages, weights) * _masked(logprobs, weights), weights)


def level_ratios(means: Tensor, logprobs: Tensor, proximal_logprobs: Tensor) -> Tensor:
    """Return log-probs whose ratio to the proximal ones is their whole unit's ratio: for `ratio_level`.

        log s_u = mean of (logprob - proximal) over the tokens of unit u
        result  = proximal + log s_u + (logprob - stop_gradient(logprob))

    So every token of a unit has the ratio s_u, and a gradient of its own: over the unit they sum to that of
    s_u where its tokens weigh the same. With the clipped loss and decisions as units this is GSPO. `means`
    are log s_u of each token's unit, as `unit_means` gives them; all three are of one shape, as in
    `clipped_policy_loss`, and a loss gets the result instead of `logprobs`.

    Source: Zheng et al., GSPO, arXiv:2507.18071, eq. 7 (the sequence ratio) and 14 (a gradient a token). It
    clips at 3e-4 and 4e-4 (section 5.1) and weighs sequences alike; a sequence is a decision's tokens here.
    """
    return attach_gradient(logprobs, proximal_logprobs + means)


def attach_gradient(logprobs: Tensor, values: Tensor) -> Tensor:
    """`values`, which have no gradient of their own, with the gradient of `logprobs`."""
    return values + (logprobs - logprobs.detach())


def unit_means(units: Tensor, log_ratios: Tensor, weights: Tensor) -> Tensor:
    """[N] mean of the log-ratios over the tokens of each token's unit, without gradient.

    `units` are int64, equal for tokens of one unit, whose tokens have to be here all together; `log_ratios`
    are nats, as `log_ratio` gives them; tokens of weight 0 are not counted.
    """
    counted = (weights != 0).to(log_ratios.dtype)
    sums = counted.new_zeros(int(units.max()) + 1)
    tokens = sums.index_add(0, units, counted).clamp(min=1.0)
    return (sums.index_add(0, units, log_ratios.detach() * counted) / tokens)[units]


def log_ratio(logprobs: Tensor, other_logprobs: Tensor, weights: Tensor) -> Tensor:
    """logprobs - other_logprobs (nats), within +-LOG_RATIO_LIMIT; 0 where the weight is 0."""
    difference = (logprobs - other_logprobs).where(weights != 0, 0.0)
    return difference.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)


def _masked(values: Tensor, weights: Tensor) -> Tensor:
    """0 where the weight is 0, before anything is multiplied: NaN * 0 would be NaN, in the gradient too."""
    return values.where(weights != 0, 0.0)


def weighted_sum(values: Tensor, weights: Tensor) -> Tensor:
    """sum(w * value) over tokens whose weight is not 0; a scalar in the unit of the values."""
    return (_masked(values, weights) * weights).sum()


def entropy_loss(entropies: Tensor, weights: Tensor) -> Tensor:
    """-sum(w * H) in nats: added with a coefficient, it keeps the policy spread out.

    Source: Mnih et al., A3C, arXiv:1602.01783, section 4.
    """
    return -weighted_sum(entropies, weights)


LOSSES: dict[str, LossPlug] = {
    "clipped": LossPlug(clipped_policy_loss, ClipKeys),
    # arXiv:2503.14476, sections 2.3 and 3.1 to 3.3. refill_rounds as verl's recipe, of ten batches at most.
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
