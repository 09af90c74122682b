"""Creates the learner of a job in this process, or compares the gradients of advantage estimators."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shared_schemas.trajectory import Trajectory
from trainer_backend.core.critic import OfEpisode, read_column
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.learner.config import LearnerConfig
from trainer_backend.learner.device import place
from trainer_backend.learner.fit import Search, less_memory, propose
from trainer_backend.learner.learner import LocalLearner
from trainer_backend.learner.loading import load_checkpoint
from trainer_backend.learner.memory_plan import (
    MemoryPlan,
    memory_plan,
    model_configs,
    note_choice,
    refuse_too_large,
    set_micro_batches,
)
from trainer_backend.learner.ranks import ALONE, Ranks
from trainer_backend.learner.sharding import make_mesh, own_part
from trainer_backend.models.sources import tokenizer_in
from trainer_backend.parts import CreditedEpisode, Progress
from trainer_backend.run.preflight import checked_folders


class LocalFactory:
    """Creates learners in this process (implements `parts.LearnerFactory`).

    The constructor raises JobError if this machine does not have the job's device.
    """

    def __init__(
        self, config: LearnerConfig, fixed: Sequence[RolloutOnlyTable] = (), ranks: Ranks = ALONE
    ) -> None:
        placement = place(config.model.device)
        if ranks.are_several:  # needs all ranks at once, so it cannot wait until they load the model in turn
            make_mesh(ranks, config.ranks.data_parallel_replicate_degree, placement.device.type)
        self._config, self._fixed, self._ranks = config, fixed, ranks

    def fixed_folders(self, checkpoint: Path | None) -> Mapping[str, Path]:
        return checked_folders(self._fixed, self._config.model, checkpoint) if self._fixed else {}

    def plan_memory(self, checkpoint: Path | None, fixed: Sequence[Path]) -> str:
        """Estimate the memory of the run, and return the estimate as text. Raises JobError if it cannot fit.

        The plan also chooses the size of micro-batches, with which this factory then creates the learner. If
        the ranks' plans differ, all ranks use the smallest of their sizes.
        """

        def plan_of_this_rank() -> MemoryPlan:
            plan = memory_plan(self._config, checkpoint, fixed=fixed, ranks=self._ranks)
            hint = less_memory(self._config)
            if plan.shortage() is not None:
                configs = model_configs(self._config, checkpoint, fixed=fixed)
                search = Search(self._config, plan.placement, *configs)
                hint = f"{propose(search).sentence()} {hint}"
            refuse_too_large(plan, hint=hint)
            return plan

        plan = self._ranks.together(plan_of_this_rank)
        tokens = min(self._ranks.of_every_rank(plan.micro_batch_tokens))
        self._config = set_micro_batches(self._config, tokens)
        if tokens < plan.micro_batch_tokens:
            plan = note_choice(memory_plan(self._config, checkpoint, fixed=fixed, ranks=self._ranks))
        return plan.report()

    def fresh(self, prompts: Sequence[Trajectory], tokenizer_folder: Path | None) -> LocalLearner:
        tokenizer = None if tokenizer_folder is None else tokenizer_in(tokenizer_folder, self._config.model)
        return LocalLearner.fresh(self._config, prompts, tokenizer, self._ranks)

    def resumed(self, checkpoint: Path) -> tuple[LocalLearner, Progress]:
        return LocalLearner.resumed(self._config, checkpoint, self._ranks)

    def gradient_cosines(
        self,
        checkpoint: Path,
        episodes: Sequence[CreditedEpisode],
        advantages: Mapping[str, Sequence[OfEpisode]],
        tell: Callable[[int, int], None],
    ) -> list[tuple[str, str, float]]:
        """Compute the cosine between the gradients of each pair of advantage estimators.

        Each gradient is that of the policy loss for all weights, over all episodes in one step. There are no
        terms for entropy, KL, critic or routers, and no adapters. The weights are those of the checkpoint, so
        all probability ratios are 1.

        Args:
            episodes: their own advantages are not read.
            advantages: for each estimator, by name, the advantages of each episode, in the same order.
            tell: called with the number of finished gradients and the number of all gradients.

        Returns:
            For each pair of estimators: their two names and the cosine. Estimators whose gradient is 0 are
            left out.
        """
        training = self._config.training.model_copy(
            update={"entropy_coef": 0.0, "kl_coef": 0.0, "router_aux_coef": 0.0}
        )
        config = replace(self._config, lora=None, training=training)
        learner = self._ranks.in_turns(
            lambda: LocalLearner(config, *load_checkpoint(config.model, checkpoint), ranks=self._ranks)
        )
        update = learner.policy_update()
        scored = update.weighed(episodes).scored
        shares: dict[str, Tensor] = {}
        for name, of_episodes in advantages.items():
            tell(len(shares), len(advantages))
            own = dict(zip((episode.rollout_id for episode in episodes), of_episodes, strict=True))
            credited = {item.rollout_id: replace(item, advantages=own[item.rollout_id]) for item in episodes}
            # Segments whose advantages are all 0 have no gradient. Leaving them out scales the weights of all
            # other tokens by the same factor, which does not change a cosine.
            counted = [item for item in scored if np.any(read_column(item.segment, own, "advantage"))]
            update.gradient(counted or scored[:1], credited)
            shares[name] = _share(learner, self._ranks)
        return _cosines(shares, self._ranks)


def _share(learner: LocalLearner, ranks: Ranks) -> Tensor:
    """Return this rank's part of the gradient of all weights, as one float64 vector on the CPU."""
    weights = learner.model.parameters()
    gradients = (torch.zeros_like(weight) if weight.grad is None else weight.grad for weight in weights)
    return torch.cat([own_part(gradient, ranks).double().cpu() for gradient in gradients])


def _cosines(shares: Mapping[str, Tensor], ranks: Ranks) -> list[tuple[str, str, float]]:
    """Compute the cosine of each pair of vectors, of which each rank holds a part; skip zero vectors."""
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
