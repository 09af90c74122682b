"""The three objectives that train the samples of a behaviour policy (DESIGN.md 4.10).

With pi the policy in training, p the proximal policy (the learner before the step) and mu the sampler:

    decoupled     the job's loss with the ratio pi/p, times the truncated weight p/mu    three policies
    single_ratio  the job's loss with the ratio pi/mu                                    as in source 4
    reinforce     -sum(w * truncated(pi/mu) * A * log pi)                                no clip

The actor's own samples use `decoupled`: mu is the version that sampled them, and the weight corrects for
staleness. `single_ratio` centres the trust region on a fixed model, so more and more tokens are clipped as
the actor moves away from it. `reinforce` has no trust region; it only truncates.

This file uses only methods of tensors: see `core.losses`.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Literal

from trainer_backend.core.behaviour import WeightKeys, log_weights, truncated
from trainer_backend.core.losses import (
    ClipKeys,
    PolicyLoss,
    RatioLevel,
    level_ratios,
    log_ratio,
    policy_gradient_loss,
    unit_means,
)

if TYPE_CHECKING:
    from torch import Tensor

ObjectiveKind = Literal["decoupled", "single_ratio", "reinforce"]


@dataclass(frozen=True, slots=True)
class Tokens:
    """[N] columns of tokens that one policy sampled."""

    logprobs: Tensor
    """Under the policy in training (nats), with gradient."""
    proximal_logprobs: Tensor
    """Under the learner's weights before the step."""
    behaviour_logprobs: Tensor
    """Under the sampler."""
    advantages: Tensor
    """In reward units."""
    weights: Tensor
    """From `core.aggregation`."""
    behaviour_weights: Tensor
    """Truncated proximal/behaviour, computed before the first step."""
    units: Tensor
    """int64, equal for tokens of one unit of the objective's `unit_level`."""

    def at(self, chosen: Tensor | slice) -> Tokens:
        """Return the columns of some of the tokens."""
        return Tokens(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, slots=True)
class Objective:
    """The objective that trains the samples of one behaviour policy."""

    kind: ObjectiveKind
    loss: PolicyLoss
    clip: ClipKeys
    ratio_level: RatioLevel
    """Whether a clipped ratio is that of a token, a decision or an episode."""
    weighting: WeightKeys
    """How behaviour weights are truncated."""
    trains_head: bool = True
    """Whether a critic learns from the samples."""
    samples_truncated: bool = False
    """Whether the sampler excludes some tokens (top-k, top-p)."""

    @property
    def clips(self) -> bool:
        """Return whether a ratio is held within a range."""
        return self.kind != "reinforce"

    @property
    def unit_level(self) -> RatioLevel:
        """Return the unit whose tokens must all be scored before any of them can train."""
        return self.ratio_level if self.clips else self.weighting.behaviour_weight_level

    def denominators(self, tokens: Tokens) -> Tensor:
        """Return the [N] log-probs in the denominator of the ratio."""
        return tokens.proximal_logprobs if self.kind == "decoupled" else tokens.behaviour_logprobs

    def unit_logs(self, tokens: Tokens) -> Tensor | None:
        """Compute the log that the tokens of a unit share, [N]; None if each token is a unit.

        For `reinforce` it is the log of the unit's weight, a sum over tokens; otherwise the log of the unit's
        ratio, a mean. All tokens of a unit must be present.
        """
        if self.unit_level == "token":
            return None
        units = tokens.units - tokens.units.min()
        if not self.clips:
            return log_weights(tokens.logprobs, tokens.behaviour_logprobs, units)
        ratios = log_ratio(tokens.logprobs, self.denominators(tokens), tokens.weights)
        return unit_means(units, ratios, tokens.weights)

    def level_logprobs(self, tokens: Tokens, unit_logs: Tensor | None) -> Tensor:
        """Return [N] log-probs whose ratio to the denominators is the ratio of the token's unit."""
        if unit_logs is None or not self.clips:
            return tokens.logprobs
        return level_ratios(unit_logs, tokens.logprobs, self.denominators(tokens))

    def surrogate(self, tokens: Tokens, unit_logs: Tensor | None) -> Tensor:
        """Compute the loss of these tokens, in reward units; losses of micro-batches add up."""
        logprobs, denominators = self.level_logprobs(tokens, unit_logs), self.denominators(tokens)
        weights, loss = tokens.weights, self.loss
        if self.kind == "decoupled":
            weights = weights * tokens.behaviour_weights
        elif self.kind == "reinforce":
            # Truncated pi/mu, with the current policy.
            if unit_logs is None:
                unit_logs = log_weights(tokens.logprobs, tokens.behaviour_logprobs, None)
            weights, loss = weights * truncated(unit_logs, self.weighting), policy_gradient_loss
        return loss(logprobs, denominators, tokens.advantages, weights, self.clip)
