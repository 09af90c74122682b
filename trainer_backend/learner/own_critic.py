"""A critic with layers of its own: V(s) by a second model, which begins as a copy of the policy.

A linear layer on the policy's hidden states says what the policy happens to keep about a state, and a value
loss in the policy's own layers moves the policy. This critic reads the same tokens by its own layers, with an
optimizer, batches and passes of its own; it costs a forward pass for values, and a second model to train.

Ranks share its layers out as they do the policy's. A checkpoint has one file of it, whatever their number.
"""

import copy
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise, starmap
from pathlib import Path
from typing import Any

import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from transformers import PreTrainedModel

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

# Key of the count of iterations in its file; the other keys name weights.
_ITERATIONS = "iterations"


class OwnCritic:
    """Begins as a copy of the policy. Not thread-safe: one call at a time, like the learner that has it.

    `level` says where its values are read. The order of its batches follows from the job's `seed`.
    """

    def __init__(
        self, policy: Scorer, table: TrainingTable, level: ValueLevel, *, seed: int, ranks: LearnerTable
    ) -> None:
        self._scorer, self._ranks = replace(policy, model=_copied(policy, table, ranks)), policy.ranks
        self._table, self._seed, self.level = table, seed, level
        self.steps = 0  # of the optimizer, since this object was made
        self.iterations = 0  # of which it has learned, those before a resume too
        own = table.model_copy(update={"value_trunk_gradient": True})
        self._head = ValueHead(policy.model.config.hidden_size, policy.placement.device, own, level)
        rate, decay = table.critic_learning_rate, table.weight_decay
        self._optimizer = make_adamw(self._scorer.model, rate, decay, offload=table.optimizer_offload)

    def values(self, segments: Sequence[Segment]) -> list[NDArray[Any]]:
        """For each segment, [N] V of its sampled tokens in reward units, 0 where none is read; SegmentError:
        a token that the model has no embedding of.
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
        """Make `critic_passes` passes towards the episodes' targets; return the mean loss of the last one."""
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
        """Forget the gradient of layers and head."""
        self._optimizer.zero_grad(set_to_none=True)
        self._head.zero_grad()

    def gradient(self, segments: Sequence[Segment], targets: Mapping[str, CriticTargets]) -> float:
        """The gradient of a step, left on layers and head, and its loss."""
        packed, pieces = cut_pieces(segments, self._table, self._scorer)
        columns = critic_columns(segments, targets, list(dict.fromkeys(packed.segment_N.tolist())))
        ends = list(accumulate((len(piece.target_N) for piece in pieces), initial=0))
        self.zero_grad()
        total = 0.0
        with stepping(self._scorer.model):
            for (piece, tokens), counts in self._ranks.own_pieces(
                list(zip(pieces, starmap(slice, pairwise(ends)), strict=True))
            ):
                part = columns.each(lambda column: column[tokens].to(self._scorer.placement.device))  # noqa: B023
                values_N = self._head.values(self._scorer.hidden(piece))
                loss = value_loss(values_N, part, clip=self._table.value_clip)
                (loss if counts else 0.0 * loss).backward()  # type: ignore[no-untyped-call]
                total += loss.item() if counts else 0.0
        self._ranks.sum_gradients([*self._scorer.model.parameters(), *self._head.trained.values()])
        return self._ranks.sums(total)[0]

    def save(self, folder: Path, ranks: Ranks) -> None:
        """Weights and moments of its layers and of its head, as two files of a checkpoint; all ranks call it.

        The first rank writes, and has them whole in main memory meanwhile.
        """
        self._head.save(folder, ranks)
        tensors = {_ITERATIONS: torch.tensor(self.iterations)}
        for name, own in named_state(self._optimizer, dict(self._scorer.model.named_parameters())).items():
            tensor = sent_to(own, 0) if ranks.are_several else own
            if tensor is not None:
                tensors[name] = tensor.cpu()
        ranks.first_alone(lambda: save_file(tensors, folder / CRITIC_FILE))

    def restore(self, checkpoint: Path) -> None:
        """Read what `save` wrote; a checkpoint without it leaves a fresh one."""
        path = checkpoint / TRAINING_FOLDER / CRITIC_FILE
        if not path.exists():
            return
        self._head.restore(checkpoint)
        weights = dict(self._scorer.model.named_parameters())
        with restored(self._optimizer, weights, path, "the critic") as tensors:
            # The file of an older release has no count; its critic was warm.
            self.iterations = int(tensors.get(_ITERATIONS, self._table.critic_warmup))


def _copied(policy: Scorer, table: TrainingTable, ranks: LearnerTable) -> PreTrainedModel:
    """The policy's model once more, to be trained; all ranks ask for it and get their shares."""
    if not policy.ranks.are_several:
        return copy.deepcopy(policy.model)
    model = gathered_copy(policy.model)
    model.requires_grad_(True)
    model.set_attn_implementation(policy.attention.implementation)
    checkpoint_layers(model, table.gradient_checkpointing)
    shard(model, policy.ranks, ranks, policy.placement.device)
    return model
