"""Computes the loss of a micro-batch: the sum of the objectives of the policies that sampled its tokens."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trainer_backend.core.collate import Batch, to_device
from trainer_backend.core.kl import kl_loss
from trainer_backend.core.loss_metrics import clip_metrics, token_kl
from trainer_backend.core.losses import RatioLevel, attach_gradient, entropy_loss, weighted_sum
from trainer_backend.core.mixture_history import metric_name
from trainer_backend.core.objective import Objective, Tokens
from trainer_backend.core.policies import ACTOR
from trainer_backend.job.training_table import TrainingTable

# Names of the `loss/…` metrics that are also reported for each fixed policy; `_OF_CLIPPED` only if the
# objective of that policy clips its ratio.
_OF_FIXED = ("ratio_mean", "entropy")
_OF_CLIPPED = ("clip_low_share", "clip_high_share")
# KL from the proximal policy in nats, mean over the tokens of all samples. training.target_kl bounds it, so
# it is defined alike for every loss; tokens that training.skip_certain_above omits count as 0.
DRIFT = "loss/kl_to_proximal"


@dataclass(frozen=True, slots=True)
class StepSums:
    """Sums over all tokens of an optimizer step: the denominators of means over the step."""

    tokens: float
    """Number of sampled tokens, plus the step's part of the tokens that training.skip_certain_above omits."""
    weights: Mapping[str, float]
    """For each policy, by name: the sum of the weights of its tokens."""
    critic: float
    """Sum of the token weights in the value loss; 0 without a critic."""


class PolicyTerms:
    """Computes the loss and metrics of micro-batches from the objectives of the job's policies.

    `share` is the part of an iteration's sampled tokens that is trained (1 unless some are omitted).
    """

    def __init__(self, objectives: Mapping[str, Objective], table: TrainingTable, share: float = 1.0) -> None:
        self.objectives, self._table, self._share = objectives, table, share

    @property
    def numbers(self) -> dict[str, int]:
        """Return the number that stands for each policy in `Batch.policy_N`."""
        return {policy: number for number, policy in enumerate(self.objectives)}

    @property
    def unit_levels(self) -> dict[str, RatioLevel]:
        """Return for each policy the level (token, decision or episode) whose units a step may not split."""
        return {policy: objective.unit_level for policy, objective in self.objectives.items()}

    def trusted(self, batch: Batch) -> Batch:
        """Weight the value loss by behaviour weights, for samples of fixed policies; return the new batch.

        Samples of a fixed policy without `trains_head` get weight 0. If all weights are then 0, critic data
        are removed, because a zero gradient would still move the value head by AdamW's moments.
        """
        if batch.critic is None or len(self.objectives) == 1:
            return batch
        factors_N = torch.ones_like(batch.weight_N)
        for policy, chosen in self._chosen(batch):
            if policy != ACTOR:
                learns = self.objectives[policy].trains_head
                factors_N[chosen] = batch.behaviour_weight_N[chosen] if learns else 0.0
        weight_N = batch.critic.weight_N * factors_N
        return replace(batch, critic=replace(batch.critic, weight_N=weight_N) if weight_N.any() else None)

    def sums(self, batch: Batch) -> StepSums:
        """Compute the sums of a whole step, given as one batch."""
        weights = {policy: float(batch.weight_N[chosen].sum()) for policy, chosen in self._chosen(batch)}
        critic = 0.0 if batch.critic is None else float(batch.critic.weight_N.sum())
        return StepSums(len(batch.weight_N) / self._share, weights, critic)

    def has_split_units(self, batch: Batch) -> bool:
        """Return whether some units are whole episodes, whose tokens may be in several micro-batches."""
        return any(self.objectives[policy].unit_level == "episode" for policy, _ in self._chosen(batch))

    def with_unit_logs(self, batch: Batch, logprobs_N: Tensor) -> Batch:
        """Add `Objective.unit_logs`, computed from the current log-probs, to the batch of a whole step."""
        there, logs_N = to_device(batch, logprobs_N.device), torch.zeros_like(logprobs_N)
        for policy, chosen in self._chosen(there):
            unit_logs = self.objectives[policy].unit_logs(_tokens(there, logprobs_N).at(chosen))
            if unit_logs is not None:
                logs_N[chosen] = unit_logs
        return replace(batch, unit_log_N=logs_N)

    def of(
        self, batch: Batch, logprobs_N: Tensor, entropies_N: Tensor, sums: StepSums
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute a micro-batch's loss (surrogate, entropy bonus and KL term) and its metrics.

        `sums` are over the whole step. If `logprobs_N` were computed with dropout, ratios and KL use the
        values of `batch.policy_logprob_N`, because the log-probs of other policies are without dropout. In
        this case `logprobs_N` only provide the gradient.
        """
        if batch.policy_logprob_N is not None:
            logprobs_N = attach_gradient(logprobs_N, batch.policy_logprob_N)
        loss, metrics = logprobs_N.new_zeros(()), {DRIFT: 0.0}
        for policy, chosen in self._chosen(batch):
            tokens = _tokens(batch, logprobs_N).at(chosen)
            unit_logs = None if batch.unit_log_N is None else batch.unit_log_N[chosen]
            if unit_logs is None or self.objectives[policy].unit_level != "episode":
                unit_logs = self.objectives[policy].unit_logs(tokens)
            objective = self.objectives[policy]
            logprobs, denominators = (
                objective.level_logprobs(tokens, unit_logs),
                objective.denominators(tokens),
            )
            ratios = clip_metrics(logprobs, denominators, tokens.advantages, tokens.weights, objective.clip)
            terms = {name.removeprefix("loss/"): value for name, value in ratios.items()}
            surrogate = objective.surrogate(tokens, unit_logs)
            moved_N = token_kl(tokens.logprobs, tokens.proximal_logprobs, tokens.weights)
            terms["approx_kl"] = float(weighted_sum(moved_N, tokens.weights))
            terms["policy"] = surrogate.item()
            terms["entropy"] = weighted_sum(entropies_N[chosen].detach(), tokens.weights).item()
            # These importance weights let samples of a fixed policy estimate means over the proximal policy.
            trust_N = torch.ones_like(tokens.weights) if policy == ACTOR else tokens.behaviour_weights
            weights_N = tokens.weights * trust_N
            loss = loss + surrogate + self._table.entropy_coef * entropy_loss(entropies_N[chosen], weights_N)
            if batch.reference_logprob_N is not None:
                reference_N = batch.reference_logprob_N[chosen]
                distance = kl_loss(tokens.logprobs, reference_N, weights_N, kind=self._table.kl_kind)
                loss = loss + self._table.kl_coef * distance
                terms["kl"] = distance.item()
            metrics[DRIFT] += float((moved_N * trust_N).sum()) / sums.tokens
            metrics |= self._metrics(policy, terms, sums.weights[policy])
        return loss, metrics

    def _metrics(self, policy: str, terms: Mapping[str, float], share: float) -> dict[str, float]:
        """Scale a policy's sums over a micro-batch so that they add up to means over the whole step.

        `share` is the sum of the policy's token weights in the step. If it is 0, the means are 0. Minima and
        maxima are not scaled.
        """
        of_step = {
            name: value if name.endswith(("_min", "_max")) else value / (share or 1.0)
            for name, value in terms.items()
        }
        if policy == ACTOR:
            return {f"loss/{name}": value for name, value in of_step.items()}
        names = _OF_FIXED + (_OF_CLIPPED if self.objectives[policy].clips else ())
        return {metric_name(policy, name): of_step[name] for name in names}

    def _chosen(self, batch: Batch) -> Iterator[tuple[str, Tensor | slice]]:
        """Yield each policy that sampled some of the batch's tokens, with the indices of these tokens."""
        for policy, number in self.numbers.items():
            if len(self.objectives) == 1:
                yield policy, slice(None)
            elif len(chosen := (batch.policy_N == number).nonzero().squeeze(1)):
                yield policy, chosen


def _tokens(batch: Batch, logprobs_N: Tensor) -> Tokens:
    return Tokens(
        logprobs=logprobs_N,
        proximal_logprobs=batch.proximal_logprob_N,
        behaviour_logprobs=batch.packed.behaviour_logprob_N,
        advantages=batch.advantage_N,
        weights=batch.weight_N,
        behaviour_weights=batch.behaviour_weight_N,
        units=batch.unit_N,
    )
