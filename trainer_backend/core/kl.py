"""Estimates of KL(policy || reference) at each sampled token, in nats.

With d = log policy - log reference, at tokens that the policy sampled:

    k1 = d                  unbiased; may be negative
    k2 = d^2 / 2            biased, small variance
    k3 = exp(-d) - 1 + d    unbiased, never negative

As losses, their expected gradients are: of k2, that of KL(policy || reference); of k3, that of
KL(reference || policy); of k1, zero.

Source: Schulman, Approximating KL Divergence, 2020, http://joschu.net/blog/kl-approx.html.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from shared_schemas.base import did_you_mean
from trainer_backend.core.keys import Table
from trainer_backend.core.losses import log_ratio, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


class KlKeys(Table):
    """Keys of a KL in the loss."""

    kl_coef: float = Field(default=0.0, ge=0)
    """weight of the KL to the model that RL started from"""
    kl_kind: Literal["k2", "k3"] = "k3"
    """estimator of that KL"""


def k3(log_ratios: Tensor) -> Tensor:
    """Compute exp(-d) - 1 + d for d = log policy - log reference of any shape, in nats."""
    return (-log_ratios).expm1() + log_ratios


KL_ESTIMATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "k1": lambda log_ratios: log_ratios,
    "k2": lambda log_ratios: log_ratios.square() / 2.0,
    "k3": k3,
}


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, *, name: str) -> Tensor:
    """Compute sum(w * k(d)), the estimate of KL(policy || reference) as a metric (nats).

    All three tensors have one shape, log-probs in nats; tokens of weight 0 are not read. Raises ValueError
    for an unknown name.
    """
    if name not in KL_ESTIMATORS:
        raise ValueError(f"unknown KL estimator {name!r}{did_you_mean(name, KL_ESTIMATORS)}")
    return weighted_sum(KL_ESTIMATORS[name](log_ratio(logprobs, reference_logprobs, weights)), weights)


def kl_loss(logprobs: Tensor, reference_logprobs: Tensor, weights: Tensor, *, name: str) -> Tensor:
    """Compute sum(w * k(d)) as a loss that keeps the policy near the reference, with k2 or k3.

    Arguments as in `kl_estimate`. Raises ValueError for an unknown name, and for k1, whose expected gradient,
    E[grad log policy], is zero.
    """
    if name == "k1":
        raise ValueError("k1 as a loss has zero expected gradient, so it would only add noise; use k2 or k3")
    return kl_estimate(logprobs, reference_logprobs, weights, name=name)
