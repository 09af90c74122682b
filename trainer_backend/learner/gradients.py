"""How the policy gradients of estimators point, at one checkpoint."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from shared_schemas.rollouts import Rollout
from trainer_backend.credit.rewards import Policies
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.learner.stepping import Scored
from trainer_backend.learner.update import PolicyUpdate
from trainer_backend.protocols import CreditedEpisode
from trainer_backend.rundir.rollout_files import Credit


def gradient_cosines(
    config: LearnerConfig,
    policies: Policies,
    rollouts: Sequence[Rollout],
    credits: Mapping[str, Sequence[Credit]],
    *,
    checkpoint: Path,
) -> dict[tuple[str, str], float]:
    """Cosine between the gradients of each two estimators, by both orders of their names.

    Each gradient is of the job's policy loss alone (no entropy, KL or critic), over all decisions of the
    rollouts in one step, at the weights of the checkpoint, where every ratio to the proximal policy is 1. An
    estimator whose gradient is 0 is left out.

    Args:
        config: its loss, aggregation and packing are used; its adapters are not.
        policies: the policies that sampled the rollouts.
        rollouts: finished ones.
        credits: by estimator, in the order of the rollouts.
        checkpoint: a folder that `load_checkpoint` reads.
    """
    training = config.training.model_copy(update={"entropy_coef": 0.0, "kl_coef": 0.0})
    config = replace(config, lora=None, update=replace(config.update, training=training))
    learner = LocalLearner(config, *load_checkpoint(config.model, checkpoint))
    update = learner.policy_update()
    played = [
        CreditedEpisode(item.rollout_id, policies.segments_by(item), (), policy=policies.policy_by(item))
        for item in rollouts
    ]
    scored = update.weighed(played).scored
    gradients = {
        name: gradient
        for name, of_estimator in credits.items()
        if (gradient := _gradient(learner, update, scored, _advantages(rollouts, of_estimator))) is not None
    }
    return {
        (a, b): float(torch.dot(left, right))
        for a, left in gradients.items()
        for b, right in gradients.items()
        if a != b
    }


def _advantages(rollouts: Sequence[Rollout], credits: Sequence[Credit]) -> dict[str, CreditedEpisode]:
    return {
        item.rollout_id: CreditedEpisode(item.rollout_id, (), credit.token_advantages or credit.advantages_T)
        for item, credit in zip(rollouts, credits, strict=True)
    }


def _gradient(
    learner: LocalLearner,
    update: PolicyUpdate,
    scored: Sequence[Scored],
    episodes: Mapping[str, CreditedEpisode],
) -> Tensor | None:
    """All weights' gradients as one vector of length 1, in main memory; None where it is 0."""
    update.gradient(scored, episodes)
    parts = [
        weight.grad.flatten().double().cpu()
        for weight in learner.model.parameters()
        if weight.grad is not None
    ]
    whole = torch.cat(parts)
    norm = whole.norm()
    return None if norm == 0 else whole / norm
