"""How the policy gradients of estimators point, at one checkpoint."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from trainer_backend.core.critic import OfEpisode, column_of
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.sharding import own_part
from trainer_backend.protocols import CreditedEpisode


def gradient_cosines(
    config: LearnerConfig,
    checkpoint: Path,
    episodes: Sequence[CreditedEpisode],
    advantages: Mapping[str, Sequence[OfEpisode]],
    *,
    tell: Callable[[int, int], None],
    ranks: Ranks = ALONE,
) -> list[tuple[str, str, float]]:
    """Cosine between the gradients of each two estimators, with their names.

    Each gradient is of the job's policy loss alone (no entropy, KL or critic), over all decisions of the
    episodes in one step, at the weights of the checkpoint, where every ratio to the proximal policy is 1. An
    estimator whose gradient is 0 is left out.

    Args:
        config: its loss, aggregation and packing are used; its adapters are not.
        checkpoint: a folder that `load_checkpoint` reads.
        episodes: their advantages are not read.
        advantages: by estimator, in the order of the episodes.
        tell: is called with the gradients done and their total.
        ranks: that compute them together.
    """
    training = config.training.model_copy(update={"entropy_coef": 0.0, "kl_coef": 0.0})
    config = replace(config, lora=None, training=training)
    learner = ranks.in_turns(
        lambda: LocalLearner(config, *load_checkpoint(config.model, checkpoint), ranks=ranks)
    )
    update = learner.policy_update()
    scored = update.weighed(episodes).scored
    shares: dict[str, Tensor] = {}
    for name, of_episodes in advantages.items():
        tell(len(shares), len(advantages))
        own = dict(zip((episode.rollout_id for episode in episodes), of_episodes, strict=True))
        credited = {
            episode.rollout_id: replace(episode, advantages=own[episode.rollout_id]) for episode in episodes
        }
        # What has no advantage has no gradient, and weights of the rest change by a common factor at most.
        counted = [item for item in scored if np.any(column_of(item.segment, own, "advantage"))]
        update.gradient(counted or scored[:1], credited)
        shares[name] = _share(learner, ranks)
    return _cosines(shares, ranks)


def _share(learner: LocalLearner, ranks: Ranks) -> Tensor:
    """What this rank has of the gradient of all weights, as one vector in main memory; float64."""
    weights = learner.model.parameters()
    gradients = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights)
    return torch.cat([own_part(gradient, ranks).double().cpu() for gradient in gradients])


def _cosines(shares: Mapping[str, Tensor], ranks: Ranks) -> list[tuple[str, str, float]]:
    """Of vectors that lie on all ranks, each a part."""
    names = list(shares)
    pairs = [(a, b) for number, a in enumerate(names) for b in names[number:]]
    sums = ranks.sums(*(float(torch.dot(shares[a], shares[b])) for a, b in pairs)) if pairs else ()
    products = dict(zip(pairs, sums, strict=True))
    norms = {name: products[name, name] ** 0.5 for name in names}
    return [
        (a, b, product / (norms[a] * norms[b]))
        for (a, b), product in products.items()
        if a != b and norms[a] and norms[b]
    ]
