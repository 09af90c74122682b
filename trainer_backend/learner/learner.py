"""The learner in this process: model, optimizer, and what the orchestrator asks of them."""

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shared_schemas.trajectory import Trajectory
from trainer_backend.errors import JobError, NothingToLearnFrom
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.job_schema import JobConfig
from trainer_backend.learner.checkpoints import restore_progress, save_checkpoint
from trainer_backend.learner.support import refuse_unsupported
from trainer_backend.learner.update import PolicyUpdate
from trainer_backend.learner.warmup import demonstrations, warm_up
from trainer_backend.models import build_preset, load_model_folder, train_tokenizer
from trainer_backend.protocols import CreditedEpisode, Progress


class LocalLearner:
    """Holds the policy on this machine's CPU. Not thread-safe: one call at a time.

    Args:
        model, tokenizer: the policy.
        reference: the model that the KL term pulls towards; None makes it a copy when RL starts.
    """

    def __init__(
        self,
        job: JobConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerFast,
        *,
        reference: PreTrainedModel | None = None,
    ) -> None:
        refuse_unsupported(model)
        self.job, self.model, self.tokenizer = job, model, tokenizer
        self._reference = reference
        self._optimizer = torch.optim.AdamW(
            model.parameters(), lr=job.training.learning_rate, weight_decay=job.training.weight_decay
        )

    @classmethod
    def fresh(cls, job: JobConfig, prompts: Sequence[Trajectory]) -> "LocalLearner":
        """The model that the job names. A preset's tokenizer is trained on the texts of `prompts`."""
        if job.model.path is not None:
            return cls(job, *load_model_folder(job.model.path))
        assert job.model.preset is not None, "JobConfig checks that one of the two is given"
        texts, words = _texts(prompts), _tool_words(prompts)
        tokenizer = train_tokenizer(texts, job.model.vocab_size, whole_words=words)
        return cls(job, build_preset(job.model.preset, tokenizer, seed=job.job.seed), tokenizer)

    @classmethod
    def resumed(cls, job: JobConfig, checkpoint: Path) -> "tuple[LocalLearner, Progress]":
        """Model, optimizer, RNG and progress of a checkpoint."""
        model, tokenizer = load_model_folder(checkpoint)
        reference = None
        if job.training.kl_coef > 0:
            reference, _ = load_model_folder(checkpoint.with_name("iteration_0"))
        learner = cls(job, model, tokenizer, reference=reference)
        return learner, restore_progress(checkpoint, learner._optimizer)

    def warm_up(self, episodes: Sequence[Trajectory], tell: Callable[[int, int], None]) -> dict[str, float]:
        """Imitate the teacher; see `learner.warmup`."""
        table = self.job.warmup
        if table is None:
            raise JobError("the job has no [warmup]")
        torch.set_num_threads(self.job.training.threads)
        segments = demonstrations(
            episodes, ChatRenderer(self.tokenizer), min_outcome_reward=table.min_outcome_reward
        )
        self.model.train()
        result = warm_up(self.model, segments, self.job, table, tell)
        self.model.train(False)
        return {
            "warmup/examples": float(result.examples),
            "warmup/steps": float(result.steps),
            "warmup/loss": result.loss,
        }

    def update(self, episodes: Sequence[CreditedEpisode], *, iteration: int) -> dict[str, float]:
        """One iteration of policy updates; see `learner.update`."""
        torch.set_num_threads(self.job.training.threads)
        if self._reference is None and self.job.training.kl_coef > 0:
            self._reference = copy.deepcopy(self.model).requires_grad_(False)
        return PolicyUpdate(self.model, self._optimizer, self.job, self._reference).run(
            episodes, iteration=iteration
        )

    def save(self, folder: Path, progress: Progress) -> None:
        """A whole checkpoint, or a CheckpointError and nothing."""
        save_checkpoint(
            folder,
            model=self.model,
            tokenizer=self.tokenizer,
            optimizer=self._optimizer,
            progress=progress,
        )

    def weights(self) -> dict[str, Tensor]:
        """The current tensors, for the engine to copy."""
        return {name: tensor.detach() for name, tensor in self.model.state_dict().items()}


def _texts(trajectories: Sequence[Trajectory]) -> list[str]:
    """Every prompt message of the episodes."""
    texts = [
        message.content
        for trajectory in trajectories
        for step in trajectory.steps
        for message in step.observation_data.messages
        if message.content
    ]
    if not texts:
        raise NothingToLearnFrom("no prompt was seen, so there is nothing to train a tokenizer on")
    return texts


def _tool_words(trajectories: Sequence[Trajectory]) -> list[str]:
    """Names that the offered tools take as arguments: each becomes one token."""
    words: dict[str, None] = {}
    for trajectory in trajectories[:1]:
        for tool in trajectory.tools:
            _enum_words(tool.function.parameters, words)
    return list(words)


def _enum_words(schema: Any, words: dict[str, None]) -> None:
    if isinstance(schema, dict):
        words.update(dict.fromkeys(word for word in schema.get("enum", ()) if isinstance(word, str)))
        for value in schema.values():
            _enum_words(value, words)
