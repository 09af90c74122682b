"""The tables and objects of a job that a learner reads."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_backend.core.critic import ValueLevel
from trainer_backend.core.objective import Objective
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import LoraTable, TrainingTable


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """Settings of a learner: model, device and updates."""

    model: ModelTable
    lora: LoraTable | None
    """None: all weights are trained."""
    warmup: WarmupTable | None
    """None: there is no warm-up."""
    inference: InferenceTable
    """The limits of each engine."""
    engines: int
    """Number of engines on the device; 0: other servers or machines sample."""
    processes: int
    """Number of processes that use the device, including the learner's."""
    training: TrainingTable
    objectives: Mapping[str, Objective]
    """The objective of each policy's samples; the actor's comes first."""
    value_level: ValueLevel | None
    """Whether a critic's values are read by decision or by token; None without a critic."""
    planned_tokens: int
    """Denominator of `training.aggregation = "constant"`."""
    seed: int
    fixed_copies: int
    """Number of this machine's processes that serve fixed policies with a local model."""
    ranks: LearnerTable
    """[learner]."""
    servers: int = 0
    """Number of vLLM servers that the run starts on the learner's machine."""

    @property
    def has_own_critic(self) -> bool:
        """Return whether the critic has layers of its own."""
        return self.value_level is not None and self.training.critic == "own"
