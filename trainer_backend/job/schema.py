"""The schema of a job's TOML: the class `JobConfig`, and some of the classes of its tables.

The other classes are in `tables` and in the modules `*_table`. They inherit some of their keys from the
modules that use the keys, such as `core.losses`. `load.load_job` reads TOML files into a `JobConfig`, and
`docs` writes docs/configuration.md from the schema.
"""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from shared_schemas.rollouts import Seed
from trainer_backend.core.keys import Table
from trainer_backend.core.starts import CurriculumKeys
from trainer_backend.job.layers import JOB_NAME, LONGEST_NAME
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.rollout_table import (
    DataTable,
    MultiTurnTable,
    RolloutTable,
    WarmupTable,
    refuse_repeats,
)
from trainer_backend.job.tables import (
    ClusterTable,
    InferenceTable,
    LearnerTable,
    ModelTable,
    ServicesTable,
    WeightTransferTable,
)
from trainer_backend.job.training_table import AlgorithmTable, LoraTable, TrainingTable
from trainer_backend.sinks import SinksTable
from trainer_backend.store.retention import RetentionTable


class JobTable(Table):
    """[job]: the name and the seed of the job, its folder, and code of its own for the trainer."""

    name: str = Field(default="job", pattern=JOB_NAME.pattern, max_length=LONGEST_NAME)
    """name of the run directory, and first part of the model's name in requests; absent: the name of the TOML
    file, without its ending"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """seed from which all seeds of worlds, sampling and shuffling are derived"""
    runs_dir: Path = Path("runs")
    """folder that contains the run directories"""
    trainer_plugins: tuple[Path, ...] = Field(default=(), max_length=64)
    """Python files with your own estimators, losses, aggregations or schedules (docs/plugins.md)"""
    trainer_plugins_sha256: tuple[str, ...] = Field(default=(), max_length=64)
    """SHA-256 of each file of trainer_plugins. A run records them when it begins, and refuses files that have
    changed since"""


class CurriculumTable(CurriculumKeys):
    """[curriculum]: groups of episodes that start at snapshots from earlier games of the same run."""


class EvaluationTable(Table):
    """[evaluation]: when the policy is evaluated, and in which held-out worlds."""

    every_n_iters: int = Field(default=10, ge=1)
    """number of iterations between evaluations. There is also an evaluation before the first iteration and
    one after the last"""
    instances: int = Field(default=128, ge=1, le=1_000_000)
    """number of held-out worlds, or of held-out rows of [data], in an evaluation; training never uses them"""
    seeds: Annotated[tuple[Seed, ...], refuse_repeats("counts once in a mean")] = ()
    """instead of instances: the seeds of the held-out worlds, from 0 to 2**31 - 2. Training avoids these
    worlds"""
    temperature: float | None = Field(default=None, ge=0)
    """sampling temperature of evaluations; 0 is greedy; absent: that of [rollout]"""

    def evaluation_temperature(self, rollout: RolloutTable) -> float:
        """Return the sampling temperature of evaluations; 0 means greedy."""
        return rollout.temperature if self.temperature is None else self.temperature


class JobConfig(Table):
    """A whole job, table by table.

    Some tables turn something on: without [warmup] there is no warm-up, without [lora] all weights are
    trained, without [data] the environment makes its own worlds, without [curriculum] all games start at the
    beginning, without [rollout_only] the actor samples everything, and without [cluster] all roles share one
    process. The keys of any other absent table have their defaults.
    """

    job: JobTable = JobTable()
    services: ServicesTable = ServicesTable()
    model: ModelTable
    inference: InferenceTable = InferenceTable()
    cluster: ClusterTable | None = None
    learner: LearnerTable = LearnerTable()
    weight_transfer: WeightTransferTable = WeightTransferTable()
    rollout: RolloutTable = RolloutTable()
    rollout_only: tuple[RolloutOnlyTable, ...] = Field(default=(), max_length=32)
    rollout_allocation_schedule: AllocationTable | None = None
    data: DataTable | None = None
    multi_turn: MultiTurnTable = MultiTurnTable()
    training: TrainingTable = TrainingTable()
    lora: LoraTable | None = None
    algorithm: AlgorithmTable = AlgorithmTable()
    curriculum: CurriculumTable | None = None
    warmup: WarmupTable | None = None
    evaluation: EvaluationTable = EvaluationTable()
    sinks: SinksTable = SinksTable()
    retention: RetentionTable = RetentionTable()

    @property
    def weights_by_folder(self) -> bool:
        """Whether new weights reach the engine through files in a folder."""
        backend = self.weight_transfer.backend
        apart = self.cluster is not None or self.inference.engine == "vllm"
        return apart if backend is None else backend == "folder"

    @property
    def weights_by_broadcast(self) -> bool:
        """Whether the learner sends new weights to vLLM servers over NCCL or gloo, tensor by tensor."""
        return self.weight_transfer.backend == "nccl"

    @property
    def fixed_policies(self) -> tuple[RolloutOnlyTable, ...]:
        """The active tables of [rollout_only], which are those that name a model, in the order of the job."""
        return tuple(table for table in self.rollout_only if table.is_active)

    def fixed(self, name: str) -> RolloutOnlyTable:
        """Return the table of the active fixed policy of this name. Raises KeyError if there is none."""
        return {table.name: table for table in self.fixed_policies}[name]

    @field_validator("rollout_only", mode="before")
    @classmethod
    def _one_table_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @property
    def max_decisions(self) -> int:
        """The maximum number of decisions in an episode, from rollout.max_turns and max_assistant_turns."""
        return self.multi_turn.max_decisions(self.rollout.max_turns)

    @property
    def planned_tokens(self) -> int:
        """The denominator of `training.aggregation = "constant"`: a planned number of tokens in an iteration.

        It does not depend on how many tokens are sampled.
        """
        budget = self.max_decisions * self.rollout.max_tokens
        most = min(budget, self.multi_turn.max_episode_tokens or budget)
        return self.rollout.episodes_per_batch * (self.training.constant_tokens or most)
