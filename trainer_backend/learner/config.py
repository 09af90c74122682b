"""The tables and objects that a learner reads of a job."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_backend.core.critic import ValueLevel
from trainer_backend.core.objective import Objective
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import LoraTable, TrainingTable


@dataclass(frozen=True, slots=True)
class UpdateConfig:
    """How an iteration updates the policy.

    Attributes:
        objectives: by policy, for its samples; the actor's comes first.
        value_level: where a critic's values are read; None without a critic.
        planned_tokens: `training.aggregation = "constant"` divides by them.
        seed: of the job.
    """

    training: TrainingTable
    objectives: Mapping[str, Objective]
    value_level: ValueLevel | None
    planned_tokens: int
    seed: int

    @property
    def has_own_critic(self) -> bool:
        """Whether the critic has layers of its own."""
        return self.value_level is not None and self.training.critic == "own"


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """What a learner trains, on which device, and how.

    Attributes:
        lora: None: all weights are trained.
        warmup: None: there is no warm-up.
        inference: the limits of each engine that samples.
        engines: how many share the device; 0: other servers sample, or other machines.
        processes: how many use the device, the learner's among them.
        fixed_copies: how many processes of this machine serve the fixed policies with a local model too.
        ranks: [learner].
    """

    model: ModelTable
    lora: LoraTable | None
    warmup: WarmupTable | None
    inference: InferenceTable
    engines: int
    processes: int
    update: UpdateConfig
    fixed_copies: int
    ranks: LearnerTable

    @property
    def training(self) -> TrainingTable:
        return self.update.training

    @property
    def seed(self) -> int:
        return self.update.seed
