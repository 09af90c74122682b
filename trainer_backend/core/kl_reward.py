"""Computes the KL to the reference policy as a cost in the reward r_t. Pure functions of floats."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from trainer_backend.core.columns import Row
from trainer_backend.core.critic import by_decision
from trainer_backend.core.keys import Table
from trainer_backend.core.losses import LOG_RATIO_LIMIT
from trainer_backend.core.segments import Segment
from trainer_backend.errors import RewardError, place

KlKind = Literal["k1", "k2", "k3"]


class KlRewardKeys(Table):
    """Job keys of the KL cost in r_t."""

    kl_reward_coef: float = Field(default=0.0, ge=0)
    """reward units subtracted from r_t for each nat of a decision's KL to the model that RL started from;
    kl_coef is for a KL in the loss"""
    kl_reward_kind: KlKind = "k1"
    """estimator of the KL in r_t; only k1 has the gradient of the KL (docs/credit.md)"""


# Estimates as functions of d = log policy - log reference; see core.kl for tensors and their properties.
_ESTIMATES: dict[KlKind, Callable[[float], float]] = {
    "k1": lambda d: d,
    "k2": lambda d: d * d / 2.0,
    "k3": lambda d: math.expm1(-d) + d,
}


@dataclass(frozen=True, slots=True)
class ScoredTokens:
    """Log-probs of an episode's sampled tokens under policy and reference, at the sampling temperature."""

    policy_T: Sequence[Sequence[float]]
    """For each decision, the log-probs (nats) of its sampled tokens under the policy before the update."""
    reference_T: Sequence[Sequence[float]]
    """For each decision, the log-probs (nats) of its sampled tokens under the policy that RL started from."""

    @classmethod
    def of(
        cls, segments: Sequence[Segment], policy: Sequence[Row], reference: Sequence[Row]
    ) -> "ScoredTokens":
        """Build from log-probs that the learner computed, one sequence per segment."""
        return cls(by_decision(segments, policy), by_decision(segments, reference))

    def over(self, decisions: int) -> "ScoredTokens":
        """Append empty lists for last decisions without sampled tokens, to reach `decisions` lists."""
        rows: list[list[float]] = [[] for _ in range(decisions - len(self.policy_T))]
        return ScoredTokens([*self.policy_T, *rows], [*self.reference_T, *rows])


def kl_estimates(scored: ScoredTokens, kind: KlKind, *, rollout_id: str = "") -> list[list[float]]:
    """Estimate KL(policy || reference) at each token of each decision, in nats.

    Raises RewardError, which names the decision, if a log-prob is missing or not finite.
    """
    estimate = _ESTIMATES[kind]
    rows: list[list[float]] = []
    for t, (own_L, other_L) in enumerate(zip(scored.policy_T, scored.reference_T, strict=True)):
        if len(own_L) != len(other_L) or not all(map(math.isfinite, (*own_L, *other_L))):
            found = f"log-probs {list(own_L)} and, of the reference, {list(other_L)}"
            raise RewardError(f"{found}; the KL needs both of each token", where=place(rollout_id, t + 1))
        differences = (a - b for a, b in zip(own_L, other_L, strict=True))
        rows.append([estimate(max(-LOG_RATIO_LIMIT, min(LOG_RATIO_LIMIT, d))) for d in differences])
    return rows


def kl_rewards(estimates: Sequence[Sequence[float]], coef: float) -> list[float]:
    """Compute the KL term of r_t, [T]: -coef * sum of k(d) over the sampled tokens of decision t.

    With d = log policy - log reference at a sampled token, and gamma 1, the estimators have these gradients:

        k1 = d             its expected gradient is exactly that of KL(policy || reference); the usual choice
        k2 = d^2 / 2       near the reference, its expected gradient is of second order, almost zero
        k3 = e^-d - 1 + d  an unbiased estimate, but its expected gradient is that of KL(policy || reference)
                           minus that of KL(reference || policy); both cancel near the reference

    Therefore k2 and k3 hardly restrain the policy if they are in the reward. In the *loss*, minimising either
    minimises a KL (core.kl).

    `estimates` is the result of `kl_estimates`, in nats; `coef` is in reward units per nat.

    Source: Ziegler et al., arXiv:1909.08593, eq. 2, and InstructGPT, arXiv:2203.02155, eq. 2 (k1). Gradients
    as losses and as rewards: Tang & Munos, arXiv:2506.09477; arXiv:2512.21852; the tests enumerate them.
    verl's `apply_kl_penalty` and TRL's PPO put a KL cost into the reward of each token; here the sum over a
    decision's tokens is in the decision's reward, and gamma discounts per decision. verl clips k3 to
    [-10, 10]; here d is clipped to +-LOG_RATIO_LIMIT.
    """
    return [-coef * math.fsum(row) for row in estimates]
