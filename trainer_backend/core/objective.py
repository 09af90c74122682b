"""The three objectives that train on samples of a behaviour policy (DESIGN.md 4.10).

pi is the policy in training, p the proximal policy (the learner's weights before the step), mu the policy
that sampled the tokens, A the advantage and w the token's weight from `core.aggregation`:

    decoupled     the job's loss with the ratio pi/p, times the truncated weight p/mu    three policies
    single_ratio  the job's loss with the ratio pi/mu                                    as in source 4
    reinforce     -sum(w * truncated(pi/mu) * A * log pi)                                no clip

The actor's own samples use `decoupled`. For these samples, mu is the actor's version that sampled the token,
and the weight p/mu corrects for staleness. `single_ratio` centres the trust region on a fixed model, so more
and more tokens are clipped as the actor moves away from that model. `reinforce` has no trust region; it only
truncates the weight.

This file calls only methods of tensors, because the orchestrator reads it without torch.
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
    """N tokens that one policy sampled; each field has one number per token."""

    logprobs: Tensor
    """Log-probs under the policy in training (nats), with gradient."""
    proximal_logprobs: Tensor
    """Log-probs under the learner's weights before the step."""
    behaviour_logprobs: Tensor
    """Log-probs under the policy that sampled the tokens."""
    advantages: Tensor
    """In reward units."""
    weights: Tensor
    """Weights of the tokens in the loss, from `core.aggregation`."""
    behaviour_weights: Tensor
    """Truncated ratio of proximal to behaviour probability, computed before the first step."""
    units: Tensor
    """int64 number of the unit that the token belongs to; `Objective.unit_level` says what a unit is."""

    def at(self, chosen: Tensor | slice) -> Tokens:
        """Return a `Tokens` of only the chosen tokens."""
        return Tokens(**{column.name: getattr(self, column.name)[chosen] for column in fields(self)})


@dataclass(frozen=True, slots=True)
class Objective:
    """Computes the loss for the samples of one behaviour policy."""

    kind: ObjectiveKind
    loss: PolicyLoss
    clip: ClipKeys
    ratio_level: RatioLevel
    """Whether the clipped ratio is computed per token, per decision or per episode."""
    weighting: WeightKeys
    """How behaviour weights are truncated."""
    trains_head: bool = True
    """Whether the critic learns from the samples."""
    samples_truncated: bool = False
    """Whether the sampler excludes some tokens (top-k, top-p)."""

    @property
    def clips(self) -> bool:
        """Whether the loss clips its ratio; `reinforce` does not."""
        return self.kind != "reinforce"

    @property
    def unit_level(self) -> RatioLevel:
        """The level (token, decision or episode) of a unit, whose tokens share one ratio or weight.

        All tokens of a unit must be scored before any of them can train.
        """
        return self.ratio_level if self.clips else self.weighting.behaviour_weight_level

    def denominators(self, tokens: Tokens) -> Tensor:
        """Return the [N] log-probs in the ratio's denominator: under p for `decoupled`, else under mu."""
        return tokens.proximal_logprobs if self.kind == "decoupled" else tokens.behaviour_logprobs

    def unit_logs(self, tokens: Tokens) -> Tensor | None:
        """Compute for each token the log of its unit's weight or ratio, [N]; None if each token is a unit.

        For `reinforce`, this is the log of the unit's weight, a sum over the tokens of the unit. For the
        other objectives, it is the log of the unit's ratio, a mean over the tokens. All tokens of a unit must
        be present.
        """
        if self.unit_level == "token":
            return None
        units = tokens.units - tokens.units.min()
        if not self.clips:
            return log_weights(tokens.logprobs, tokens.behaviour_logprobs, units)
        ratios = log_ratio(tokens.logprobs, self.denominators(tokens), tokens.weights)
        return unit_means(units, ratios, tokens.weights)

    def level_logprobs(self, tokens: Tokens, unit_logs: Tensor | None) -> Tensor:
        """Return [N] log-probs. Minus `denominators`, they are the log of the ratio of each token's unit.

        For `reinforce`, whose loss computes no ratio, the result is `tokens.logprobs`.
        """
        if unit_logs is None or not self.clips:
            return tokens.logprobs
        return level_ratios(unit_logs, tokens.logprobs, self.denominators(tokens))

    def surrogate(self, tokens: Tokens, unit_logs: Tensor | None) -> Tensor:
        """Compute the loss of these tokens, in reward units; micro-batch losses sum to the step's loss."""
        logprobs, denominators = self.level_logprobs(tokens, unit_logs), self.denominators(tokens)
        weights, loss = tokens.weights, self.loss
        if self.kind == "decoupled":
            weights = weights * tokens.behaviour_weights
        elif self.kind == "reinforce":
            # Weight with the truncated pi/mu, where pi is the current policy.
            if unit_logs is None:
                unit_logs = log_weights(tokens.logprobs, tokens.behaviour_logprobs, None)
            weights, loss = weights * truncated(unit_logs, self.weighting), policy_gradient_loss
        return loss(logprobs, denominators, tokens.advantages, weights, self.clip)
