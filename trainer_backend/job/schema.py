"""The tables of a job's TOML. Each key, with its default and bounds, is here or in a module `*_table`.

`load.load_job` reads a file into `JobConfig`; a test compares docs/configuration.md with it.
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
    """[job]"""

    name: str = Field(default="job", pattern=JOB_NAME.pattern, max_length=LONGEST_NAME)
    """first part of the model's name in requests, and the run directory's name; absent: the file's name"""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """root of every world, sampling and shuffle seed"""
    runs_dir: Path = Path("runs")
    """parent of run directories"""
    trainer_plugins: tuple[Path, ...] = Field(default=(), max_length=64)
    """Python files with estimators, losses, aggregations or schedules of your own (docs/plugins.md)"""
    trainer_plugins_sha256: tuple[str, ...] = Field(default=(), max_length=64)
    """SHA-256 of each file of trainer_plugins; a run refuses a file with another digest"""


class CurriculumTable(CurriculumKeys):
    """[curriculum]: groups that start at snapshots of the run's own games."""


class EvaluationTable(Table):
    """[evaluation]"""

    every_n_iters: int = Field(default=10, ge=1)
    """iterations between evaluations; the first is before, and the last after, all iterations"""
    instances: int = Field(default=128, ge=1, le=1_000_000)
    """held-out worlds, or rows of [data], never used in training"""
    seeds: Annotated[tuple[Seed, ...], refuse_repeats("counts once in a mean")] = ()
    """held-out worlds by seed, from 0 to 2**31 - 2, instead of instances; training then avoids them"""
    temperature: float | None = Field(default=None, ge=0)
    """sampling temperature; 0 is greedy; absent: as in [rollout]"""

    def evaluation_temperature(self, rollout: RolloutTable) -> float:
        """Return the temperature of evaluations; 0 is greedy."""
        return rollout.temperature if self.temperature is None else self.temperature


class JobConfig(Table):
    """A whole job. Absent tables have their defaults.

    Without [warmup] there is no warm-up, without [lora] all weights are trained, without [data] the
    environment makes its own worlds, without [curriculum] games start at the beginning, and without [cluster]
    there is one process.
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
        """Whether new weights reach the engine as a folder, and not within the process's memory."""
        backend = self.weight_transfer.backend
        apart = self.cluster is not None or self.inference.engine == "vllm"
        return apart if backend is None else backend == "folder"

    @property
    def weights_by_broadcast(self) -> bool:
        """Whether the learner's process sends new weights to vLLM servers, tensor by tensor."""
        return self.weight_transfer.backend == "nccl"

    @property
    def fixed_policies(self) -> tuple[RolloutOnlyTable, ...]:
        """The tables of [rollout_only] that name a model, in their order; most jobs have none."""
        return tuple(table for table in self.rollout_only if table.is_active)

    def fixed(self, name: str) -> RolloutOnlyTable:
        """Return the active fixed policy of that name, or raise KeyError."""
        return {table.name: table for table in self.fixed_policies}[name]

    @field_validator("rollout_only", mode="before")
    @classmethod
    def _one_table_is_a_list_of_one(cls, value: Any) -> Any:
        return [value] if isinstance(value, dict) else value

    @property
    def max_decisions(self) -> int:
        """The most decisions of an episode, by the lower one of its two limits."""
        return self.multi_turn.max_decisions(self.rollout.max_turns)

    @property
    def planned_tokens(self) -> int:
        """The number by which `training.aggregation = "constant"` divides, whatever is sampled."""
        budget = self.max_decisions * self.rollout.max_tokens
        most = min(budget, self.multi_turn.max_episode_tokens or budget)
        return self.rollout.episodes_per_batch * (self.training.constant_tokens or most)
