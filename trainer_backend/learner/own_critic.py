"""A critic with its own layers: it predicts V(s) by a second model, which begins as a copy of the policy.

The alternative is a linear layer on the policy's hidden states. It can use only what the policy encodes about
a state. If its loss also trains the policy's layers, it changes the policy. This critic has its own layers,
optimizer, batches and passes, but it costs another forward pass and a second model to train.

Ranks shard its layers like those of the policy. Its files in a checkpoint do not depend on the number of
ranks.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, starmap
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import PreTrainedModel

from trainer_backend.core.collate import map_tensors, to_device
from trainer_backend.core.critic import CriticTargets, ValueLevel
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.segments import Segment
from trainer_backend.core.value_loss import critic_columns, value_loss
from trainer_backend.errors import NonFiniteLoss
from trainer_backend.job.tables import LearnerTable
from trainer_backend.job.training_table import TrainingTable
from trainer_backend.learner.optimizer import make_adamw, named_state, restored
from trainer_backend.learner.ranks import Ranks
from trainer_backend.learner.scoring import Scorer, cut_pieces, read_pieces, refuse_unknown
from trainer_backend.learner.sharding import clip_gradient, gathered_copy, sent_to, shard
from trainer_backend.learner.stepping import Scored, checkpoint_layers, in_steps, stepping
from trainer_backend.learner.value_head import ValueHead
from trainer_backend.parts import CreditedEpisode
from trainer_backend.rundir.checkpoint_paths import CRITIC_FILE, TRAINING_FOLDER

# Key of the number of iterations in the critic's file; the other keys name weights and their moments.
_ITERATIONS = "iterations"


class OwnCritic:
    """A second model that predicts values. It begins as a copy of the policy. Not thread-safe.

    `level` determines whether the critic predicts one value per decision or per token. The job's `seed`
    determines the order of batches.
    """

    def __init__(
        self, policy: Scorer, table: TrainingTable, level: ValueLevel, *, seed: int, ranks: LearnerTable
    ) -> None:
        self._scorer, self._ranks = replace(policy, model=_copy_policy(policy, table, ranks)), policy.ranks
        self._table, self._seed, self.level = table, seed, level
        self.steps = 0  # optimizer steps since this object was made
        self.iterations = 0  # iterations on which it was trained, including those before a resume
        own = table.model_copy(update={"value_trunk_gradient": True})
        self._head = ValueHead(policy.model.config.hidden_size, policy.placement.device, own, level)
        rate, decay, epsilon = table.critic_learning_rate, table.weight_decay, table.adam_epsilon
        model, offload = self._scorer.model, table.optimizer_offload
        self._optimizer = make_adamw(model, rate, decay, epsilon=epsilon, offload=offload)

    def values(self, segments: Sequence[Segment]) -> list[NDArray[Any]]:
        """Compute the values [N] at the N sampled tokens of each segment, in units of the reward.

        With one value per decision, the value is 0 at every token that does not begin a decision. Raises
        SegmentError for a token without an embedding.
        """
        refuse_unknown(segments, self._scorer.model)
        (values,) = read_pieces(
            segments,
            self._scorer.hidden,
            lambda states: (self._head.scored(states),),
            self._table,
            self._scorer,
        )
        self._head.settle(self._ranks)
        return values

    def fit(self, episodes: Sequence[CreditedEpisode], iteration: int) -> dict[str, float]:
        """Make `critic_passes` passes over the episodes' targets; return the mean loss of the last pass."""
        targets = {episode.rollout_id: episode.critic for episode in episodes if episode.critic is not None}
        items = [
            [Scored(segment)] for item in episodes if item.critic is not None for segment in item.segments
        ]
        losses: list[float] = []
        for number in range(self._table.critic_passes):
            order = list(items)
            random.Random(derived_seed(self._seed, "critic-shuffle", iteration, number)).shuffle(order)
            steps = in_steps(order, self._table.critic_batch_decisions)
            losses = [self._step([item.segment for item in step], targets) for step in steps]
        self.iterations += 1
        return {"value/loss": sum(losses) / len(losses)} if losses else {}

    def _step(self, segments: Sequence[Segment], targets: Mapping[str, CriticTargets]) -> float:
        loss = self.gradient(segments, targets)
        norm = clip_gradient(self._scorer.model.parameters(), self._table.max_grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise NonFiniteLoss(
                f"the critic's loss is {loss}, the norm of its gradient {norm}; its weights are kept",
                hint="Lower training.critic_learning_rate.",
            )
        self._head.refuse_non_finite()
        self._optimizer.step()
        self._head.step(policy_rate=self._table.learning_rate)
        self.steps += 1
        return loss

    def zero_grad(self) -> None:
        """Clear the gradients of the layers and of the value head."""
        self._optimizer.zero_grad(set_to_none=True)
        self._head.zero_grad()

    def gradient(self, segments: Sequence[Segment], targets: Mapping[str, CriticTargets]) -> float:
        """Compute the gradients of one optimizer step into the weights' `grad`; return the step's loss."""
        packed, pieces = cut_pieces(segments, self._table, self._scorer)
        columns = critic_columns(segments, targets, list(dict.fromkeys(packed.segment_N.tolist())))
        ends = list(accumulate((len(piece.target_N) for piece in pieces), initial=0))
        self.zero_grad()
        total = 0.0
        with stepping(self._scorer.model):
            for (piece, tokens), counts in self._ranks.own_pieces(
                list(zip(pieces, starmap(slice, pairwise(ends)), strict=True))
            ):
                part = to_device(map_tensors(columns, itemgetter(tokens)), self._scorer.placement.device)
                values_N = self._head.values(self._scorer.hidden(piece))
                loss = value_loss(values_N, part, clip=self._table.value_clip)
                (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
                total += loss.item() if counts else 0.0
        self._ranks.sum_gradients([*self._scorer.model.parameters(), *self._head.trained.values()])
        return self._ranks.sums(total)[0]

    def save(self, folder: Path, ranks: Ranks) -> None:
        """Write the layers and the value head, with their moments, to two files of a checkpoint.

        All ranks must call this. The first rank gathers everything in its main memory and writes the files.
        """
        self._head.save(folder, ranks)
        tensors = {_ITERATIONS: torch.tensor(self.iterations)}
        for name, own in named_state(self._optimizer, dict(self._scorer.model.named_parameters())).items():
            tensor = sent_to(own, 0) if ranks.are_several else own
            if tensor is not None:
                tensors[name] = tensor.cpu()
        ranks.first_alone(lambda: save_file(tensors, folder / CRITIC_FILE))

    def restore(self, checkpoint: Path) -> None:
        """Load what `save` wrote. If the checkpoint has no file of an own critic, nothing changes."""
        path = checkpoint / TRAINING_FOLDER / CRITIC_FILE
        if not path.exists():
            return
        self._head.restore(checkpoint)
        weights = dict(self._scorer.model.named_parameters())
        with restored(self._optimizer, weights, path, "the critic") as tensors:
            # Files of older releases have no count; their critics were warm.
            self.iterations = int(tensors.get(_ITERATIONS, self._table.critic_warmup))


def _copy_policy(policy: Scorer, table: TrainingTable, ranks: LearnerTable) -> PreTrainedModel:
    """Copy the policy's model for training. All ranks must call this; each gets its share of the copy."""
    if not policy.ranks.are_several:
        return copy.deepcopy(policy.model)
    model = gathered_copy(policy.model)
    model.requires_grad_(True)
    model.set_attn_implementation(policy.attention.implementation)
    checkpoint_layers(model, table.gradient_checkpointing)
    shard(model, policy.ranks, ranks, policy.placement.device)
    return model
