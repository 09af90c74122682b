"""How the policy gradients of estimators point, at one checkpoint."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from shared_schemas.rollouts import Rollout
from trainer_backend.credit.credit import CreditAssignment
from trainer_backend.job.schema import JobConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.learner.stepping import Scored
from trainer_backend.learner.update import PolicyUpdate
from trainer_backend.protocols import CreditedEpisode
from trainer_backend.rundir.rollout_files import Credit


def gradient_cosines(
    job: JobConfig,
    rollouts: Sequence[Rollout],
    credits: Mapping[str, Sequence[Credit]],
    checkpoint: Path,
) -> dict[tuple[str, str], float]:
    """Cosine between the gradients of each two estimators, by both orders of their names.

    A gradient is that of the job's policy loss alone (no entropy, KL or critic) over all decisions of the
    rollouts in one step, at the weights of the checkpoint, where every ratio to the proximal policy is 1. An
    estimator whose gradient is 0 has none to compare: it is left out.

    Args:
        job: its loss, aggregation and packing.
        rollouts: finished ones.
        credits: by estimator, in the order of the rollouts.
        checkpoint: a folder that `load_checkpoint` reads.

    Raises:
        ModelFolderError, CheckpointError: the checkpoint cannot be read.
    """
    alone = job.training.model_copy(update={"entropy_coef": 0.0, "kl_coef": 0.0})
    job = job.model_copy(update={"training": alone, "lora": None})
    learner = LocalLearner(job, *load_checkpoint(job.model, checkpoint))
    update = learner.policy_update()
    policies = CreditAssignment.of(job).policies
    played = [
        CreditedEpisode(item.rollout_id, policies.segments_by(item), (), policy=policies.policy_by(item))
        for item in rollouts
    ]
    scored = update.weighed(played).scored
    gradients = {
        name: gradient
        for name, of_rollouts in credits.items()
        if (gradient := _gradient(update, learner, scored, rollouts, of_rollouts)) is not None
    }
    return {
        (a, b): float(torch.dot(left, right))
        for a, left in gradients.items()
        for b, right in gradients.items()
        if a != b
    }


def _gradient(
    update: PolicyUpdate,
    learner: LocalLearner,
    scored: Sequence[Scored],
    rollouts: Sequence[Rollout],
    credits: Sequence[Credit],
) -> Tensor | None:
    """All weights' gradients as one vector of length 1, in main memory; None where it is 0."""
    episodes = {
        item.rollout_id: CreditedEpisode(item.rollout_id, (), credit.token_advantages or credit.advantages_T)
        for item, credit in zip(rollouts, credits, strict=True)
    }
    update.gradient(scored, episodes)
    parts = [
        weight.grad.flatten().double().cpu()
        for weight in learner.model.parameters()
        if weight.grad is not None
    ]
    whole = torch.cat(parts)
    norm = whole.norm()
    return None if norm == 0 else whole / norm
