"""KL to the reference policy as a cost in r_t. Pure, on floats."""

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
    """Keys of a KL in r_t."""

    kl_reward_coef: float = Field(default=0.0, ge=0)
    """reward units that a decision pays in r_t per nat of its KL to the model that RL started from; kl_coef
    acts in the loss instead"""
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
    """Log-probs of an episode's sampled tokens under two policies, at the temperature of sampling."""

    policy_T: Sequence[Sequence[float]]
    """For each decision, the log-probs of its tokens under the policy before the update (nats)."""
    reference_T: Sequence[Sequence[float]]
    """For each decision, the log-probs of its tokens under the policy that RL started from."""

    @classmethod
    def of(
        cls, segments: Sequence[Segment], policy: Sequence[Row], reference: Sequence[Row]
    ) -> "ScoredTokens":
        """Build from the learner's log-probs of each segment's sampled tokens."""
        return cls(by_decision(segments, policy), by_decision(segments, reference))

    def over(self, decisions: int) -> "ScoredTokens":
        """Pad to this number of decisions: the last ones of an episode may have sampled no token."""
        rows: list[list[float]] = [[] for _ in range(decisions - len(self.policy_T))]
        return ScoredTokens([*self.policy_T, *rows], [*self.reference_T, *rows])


def kl_estimates(scored: ScoredTokens, kind: KlKind, *, rollout_id: str = "") -> list[list[float]]:
    """Estimate KL(policy || reference) at each token of each decision, in nats.

    Raises RewardError with the decision if a log-prob is missing or not finite.
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
    """Compute the [T] costs of KL in r_t: -coef * sum of k(d) over the tokens of decision t.

    With d = log policy - log reference at a sampled token, and gamma 1, the kinds act as a reward as follows:

        k1 = d             its expected gradient is exactly that of KL(policy || reference); the usual choice
        k2 = d^2 / 2       near the reference, its pull is of second order: almost none
        k3 = e^-d - 1 + d  unbiased as a number, but its gradient is that of KL(policy || reference) minus
                           that of KL(reference || policy), which cancel near the reference: no pull

    So k2 and k3, which as a *loss* each descend a KL (core.kl), hardly restrain a policy as a reward.

    `estimates` are those of `kl_estimates`, in nats; `coef` is in reward units per nat.

    Source: Ziegler et al., arXiv:1909.08593, eq. 2, and InstructGPT, arXiv:2203.02155, eq. 2 (k1). Gradients
    as losses and as rewards: Tang & Munos, arXiv:2506.09477; arXiv:2512.21852; the tests enumerate them.
    Other code rewards each token (verl's `apply_kl_penalty`, trl's PPO); here the decision is rewarded, and
    gamma counts decisions. verl clips k3 to [-10, 10]; here d is clipped to +-LOG_RATIO_LIMIT.
    """
    return [-coef * math.fsum(row) for row in estimates]
