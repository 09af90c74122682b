"""The settings of a job that its learner reads."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_backend.core.critic import ValueLevel
from trainer_backend.core.objective import Objective
from trainer_backend.job.rollout_table import WarmupTable
from trainer_backend.job.tables import InferenceTable, LearnerTable, ModelTable
from trainer_backend.job.training_table import LoraTable, TrainingTable


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """The settings of a learner: tables of the job, and values that are derived from the whole job."""

    model: ModelTable
    lora: LoraTable | None
    """The settings of adapters; None if all weights are trained."""
    warmup: WarmupTable | None
    """The settings of the warm-up; None if there is no warm-up."""
    inference: InferenceTable
    """The settings of sampling, such as the limits of each inference engine."""
    engines: int
    """Number of local inference engines on the learner's device; 0 if tokens are sampled elsewhere."""
    processes: int
    """Number of processes that use the learner's device, including the learner's own process."""
    training: TrainingTable
    objectives: Mapping[str, Objective]
    """The training objective for the samples of each policy, by its name; the actor comes first."""
    value_level: ValueLevel | None
    """Whether the critic predicts a value per decision or per token; None without a critic."""
    planned_tokens: int
    """The fixed number of tokens by which `training.aggregation = "constant"` divides the loss."""
    seed: int
    fixed_copies: int
    """Number of processes on this machine that each hold local models of the fixed policies."""
    ranks: LearnerTable
    """The table [learner], which contains the number of ranks."""
    servers: int = 0
    """Number of vLLM servers that the run starts on the learner's machine; 0 for any other engine."""

    @property
    def has_own_critic(self) -> bool:
        """Return whether there is a critic with layers of its own, apart from the policy's."""
        return self.value_level is not None and self.training.critic == "own"
