"""The tables of a job's TOML. Every key, with its default and bounds, is here or in the table modules beside.

`load.load_job` reads a file into `JobConfig`; a test compares docs/configuration.md with it.
"""

from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from shared_schemas.rollouts import Seed
from trainer_backend.core.keys import Table
from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.job.layers import JOB_NAME, LONGEST_NAME
from trainer_backend.job.mixture_table import AllocationTable, RolloutOnlyTable
from trainer_backend.job.rollout_table import (
    SET_BY_ROWS,
    DataTable,
    MultiTurnTable,
    RolloutTable,
    WarmupTable,
    refuse_duplicates,
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

    name: str = Field(
        default="job",
        pattern=JOB_NAME.pattern,
        max_length=LONGEST_NAME,
        description="first part of `model` and of the run directory's name; absent: the file's name",
    )
    seed: int = Field(default=0, ge=0, lt=2**31, description="root of every world, sampling and shuffle seed")
    runs_dir: Path = Field(default=Path("runs"), description="parent of run directories")
    trainer_plugins: tuple[Path, ...] = Field(
        default=(),
        max_length=64,
        description="Python files with estimators, losses, aggregations or schedules of your own "
        "(docs/plugins.md)",
    )
    trainer_plugins_sha256: tuple[str, ...] = Field(
        default=(),
        max_length=64,
        description="SHA-256 of each file of trainer_plugins; a run refuses a file with another one",
    )


class EvaluationTable(Table):
    """[evaluation]"""

    every_n_iters: int = Field(
        default=10,
        ge=1,
        description="iterations between evaluations; also before the first and after the last",
    )
    instances: int = Field(
        default=128,
        ge=1,
        le=1_000_000,
        description="held-out worlds, or rows of [data], never used in training",
    )
    seeds: tuple[Seed, ...] = Field(
        default=(), description="explicit worlds instead, from 0 to 2**31 - 2; training then avoids them"
    )
    temperature: float | None = Field(
        default=None, ge=0, description="sampling temperature; 0 is greedy; absent: as in [rollout]"
    )

    def temperature_beside(self, rollout: RolloutTable) -> float:
        """The temperature of evaluations; 0 is greedy."""
        return rollout.temperature if self.temperature is None else self.temperature

    @field_validator("seeds")
    @classmethod
    def _each_world_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return refuse_duplicates(seeds, "counts once in a mean")


class JobConfig(Table):
    """A whole job. Absent tables have their defaults.

    Without [warmup] there is no warm-up, without [lora] all weights are trained, without [data] the
    environment makes its own worlds, and without [cluster] there is one process.
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
    warmup: WarmupTable | None = None
    evaluation: EvaluationTable = EvaluationTable()
    sinks: SinksTable = SinksTable()
    retention: RetentionTable = RetentionTable()

    @property
    def evaluation_temperature(self) -> float:
        """The temperature of evaluations; 0 is greedy."""
        return self.evaluation.temperature_beside(self.rollout)

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

    @model_validator(mode="after")
    def _tables_agree(self) -> "JobConfig":
        if self.rollout.episodes_per_batch % self.training.group_size:
            raise ValueError(
                f"rollout.episodes_per_batch ({self.rollout.episodes_per_batch}) must be a multiple of "
                f"training.group_size ({self.training.group_size})"
            )
        if self.rollout.max_tokens >= self.inference.max_model_len:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) must be below inference.max_model_len "
                f"({self.inference.max_model_len}): prompt and response share it"
            )
        if self.multi_turn.enable and self.rollout.max_tokens >= self.multi_turn.max_model_length:
            raise ValueError(
                f"rollout.max_tokens ({self.rollout.max_tokens}) must be below multi_turn.max_model_length "
                f"({self.multi_turn.max_model_length}): prompt and response share it"
            )
        self._refuse_shared_worlds()
        self._refuse_worlds_beside_rows()
        self._refuse_interactions_for_others()
        self._refuse_idle_processes()
        if self.training.refill_rounds and not self.training.skip_flat_groups:
            raise ValueError("training.refill_rounds needs training.skip_flat_groups = true")
        if self.training.max_staleness and self.inference.deterministic:
            raise ValueError(
                f"training.max_staleness = {self.training.max_staleness} with inference.deterministic: "
                "which version samples a token would depend on how long other work takes; drop one of them"
            )
        truncation = self.rollout.truncation
        if truncation and not self.rollout.allow_truncated_sampling:
            raise ValueError(
                f"[rollout] {truncation} removes probability that training would still count; set "
                "rollout.allow_truncated_sampling = true to accept that"
            )
        temperatures = {self.rollout.temperature, self.evaluation_temperature} - {0.0}
        if self.inference.engine == "vllm" and not all(0.01 <= value <= 2 for value in temperatures):
            raise ValueError("inference.engine = 'vllm' allows temperatures from 0.01 to 2, and 0")
        if self.inference.engine == "vllm" and truncation:
            raise ValueError(
                f"[rollout] {truncation} with inference.engine = 'vllm': it returns log-probs of the "
                "truncated distribution, and training computes those of the whole one"
            )
        return self

    def _refuse_shared_worlds(self) -> None:
        if not self.rollout.seeds:
            return  # new worlds never coincide with the held-out ones
        explicit = self.evaluation.seeds
        held_out = set(explicit) if explicit else evaluation_worlds(self.evaluation.instances)
        shared = sorted(seed for seed in self.rollout.seeds if seed in held_out)
        if shared:
            raise ValueError(
                f"rollout.seeds and the worlds of the evaluation share {shared[0]}: what was trained on "
                "is not held out; take it from one of the two"
            )

    @property
    def max_decisions(self) -> int:
        """Decisions that an episode may take, by whichever limit is lower."""
        return self.multi_turn.max_decisions(self.rollout.max_turns)

    @property
    def planned_tokens(self) -> int:
        """Tokens that `training.aggregation = "constant"` divides an iteration by, whatever is sampled."""
        budget = self.max_decisions * self.rollout.max_tokens
        most = min(budget, self.multi_turn.max_episode_tokens or budget)
        return self.rollout.episodes_per_batch * (self.training.constant_tokens or most)

    def _refuse_interactions_for_others(self) -> None:
        if self.data is not None and self.data.interaction is not None and not self.multi_turn.enable:
            raise ValueError(
                f"data.interaction is {self.data.interaction!r}, who answers in conversations, and "
                "multi_turn.enable is false"
            )
        if self.services.task_url and self.multi_turn.interaction_config_path is not None:
            raise ValueError(
                "multi_turn.interaction_config_path is for the task app that the job starts itself, and "
                "services.task_url names others: start those with `turnwise task-app --interactions FILE`"
            )

    def _refuse_idle_processes(self) -> None:
        gateways, urls = self.services.gateways, self.inference.urls
        servers, key = (len(urls), "urls") if urls else (self.inference.replicas, "replicas")
        if gateways > 1 and self.cluster is None:
            raise ValueError(
                f"services.gateways is {gateways}, and without [cluster] a run is one process with one "
                'gateway; did you leave out [cluster] with launcher = "local"?'
            )
        if self.inference.own_process and self.cluster is None:
            raise ValueError(
                "inference.own_process is true, and without [cluster] a run is one process; did you leave "
                'out [cluster] with launcher = "local"?'
            )
        if self.inference.engine == "vllm" and gateways > servers:
            raise ValueError(
                f"services.gateways is {gateways}, and inference.{key} names {servers} servers: each gateway "
                "has servers of its own"
            )
        if self.services.gateway_port and self.services.gateway_port + gateways - 1 > 65535:
            raise ValueError(
                f"services.gateways is {gateways}, and from services.gateway_port = "
                f"{self.services.gateway_port} on there are not so many ports"
            )

    def _refuse_worlds_beside_rows(self) -> None:
        worlds = {"rollout.seeds": self.rollout.seeds, "evaluation.seeds": self.evaluation.seeds}
        for key, seeds in worlds.items():
            if seeds and self.data is not None:
                raise ValueError(f"{key} names worlds, and [data] the rows that are played in their place")
        for key in SET_BY_ROWS if self.data is not None else ():
            if key in self.rollout.env_config:
                raise ValueError(f"rollout.env_config.{key} is that of each row of [data]; leave it out")
