"""Estimates of KL(policy || reference) at each sampled token, in nats.

With d = log policy - log reference, at tokens that the policy sampled:

    k1 = d                  unbiased; may be negative
    k2 = d^2 / 2            biased, small variance
    k3 = exp(-d) - 1 + d    unbiased, never negative

If an estimate is minimised as a loss, the expected gradient of k2 is the gradient of KL(policy || reference),
and the expected gradient of k3 is the gradient of KL(reference || policy). The expected gradient of k1 is
zero, so k1 cannot serve as a loss.

Source: Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.core.losses import log_ratio, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


LossKind = Literal["k2", "k3"]


class KlKeys(Table):
    """Job keys of the KL term in the loss."""

    kl_coef: float = Field(default=0.0, ge=0)
    """weight of the KL to the model that RL started from"""
    kl_kind: LossKind = "k3"
    """estimator of the KL in the loss"""


def k3(log_ratios: Tensor) -> Tensor:
    """Compute exp(-d) - 1 + d for d = log policy - log reference of any shape, in nats."""
    return (-log_ratios).expm1() + log_ratios


KL_ESTIMATORS: dict[LossKind, Callable[[Tensor], Tensor]] = {
    "k2": lambda log_ratios: log_ratios.square() / 2.0,
    "k3": k3,
}


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, *, kind: LossKind) -> Tensor:
    """Compute the KL term sum(w * k(d)), in nats, which keeps the policy near the reference.

    k is the estimator `kind`, and d = logprobs - reference_logprobs (nats). All three tensors have the same
    shape. Tokens of weight 0 are ignored.
    """
    return weighted_sum(KL_ESTIMATORS[kind](log_ratio(logprobs, reference_logprobs, weights)), weights)
