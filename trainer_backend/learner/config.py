"""The tables and objects that a learner reads of a job."""

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
    """The limits of each engine that samples."""
    engines: int
    """How many share the device; 0: other servers sample, or other machines."""
    processes: int
    """How many use the device, the learner's among them."""
    training: TrainingTable
    objectives: Mapping[str, Objective]
    """By policy, for its samples; the actor's comes first."""
    value_level: ValueLevel | None
    """Where a critic's values are read; None without a critic."""
    planned_tokens: int
    """`training.aggregation = "constant"` divides by them."""
    seed: int
    fixed_copies: int
    """How many processes of this machine serve the fixed policies with a local model too."""
    ranks: LearnerTable
    """[learner]."""
    servers: int = 0
    """vLLM servers that the run starts on the learner's machine."""

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic has layers of its own."""
        return self.value_level is not None and self.training.critic == "own"
