"""The tables of a job TOML. Every key is here or in a `…_table.py` beside, with its default and its bounds.

`trainer_backend.job.load_job` reads a file into `JobConfig`; docs/configuration.md is checked against it.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from shared_schemas.patterns import Pattern
from shared_schemas.rollouts import Name, Seed, TerminationTarget
from trainer_backend.core.seeds import evaluation_worlds
from trainer_backend.jobfile.data_table import DataTable
from trainer_backend.jobfile.model_table import ModelTable
from trainer_backend.jobfile.multi_turn_table import MultiTurnTable
from trainer_backend.jobfile.services_table import ServicesTable
from trainer_backend.jobfile.sinks_table import SinksTable
from trainer_backend.jobfile.table import Table
from trainer_backend.jobfile.training_table import AlgorithmTable, LoraTable, TrainingTable

# What the job itself sends with every rollout: given in a config too, the two must agree in every stage.
_SENT_BY_THE_JOB = {"step_rewards": "the step_rewards_* keys of [training]"}
# What a policy is told by the job itself, and the key that says it. Given in rollout.policy_config it would
# replace what the job checks, trains on and derives its seeds for.
SET_BY_THE_JOB = {
    **_SENT_BY_THE_JOB,
    "temperature": "rollout.temperature",
    "top_p": "rollout.top_p",
    "top_k": "rollout.top_k",
    "max_tokens": "rollout.max_tokens",
    "max_model_length": "multi_turn.max_model_length",
    "seed": "job.seed",
    "model": "job.name",
    "inference_url": "services.gateway_host and services.gateway_port",
}

# What a row of [data] puts into the environment's config.
SET_BY_ROWS = ("prompt", "document_content", "question", "ground_truth")


def _refuse_keys(config: dict[str, Any], set_elsewhere: Mapping[str, str]) -> dict[str, Any]:
    for key in config:
        if key in set_elsewhere:
            raise ValueError(f"{key!r} is set by the job itself; use {set_elsewhere[key]}")
    return config


class JobTable(Table):
    """[job]"""

    name: str = Field(
        default="job", pattern=r"^[A-Za-z0-9._-]+$", max_length=60, description="first part of `model`"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="every world, sampling and shuffle seed follows from it"
    )
    runs_dir: Path = Field(default=Path("runs"), description="where run directories are made")


class InferenceTable(Table):
    """[inference]"""

    threads: int = Field(default=1, ge=1, le=256, description="torch threads while rollouts are collected")
    max_running: int = Field(default=64, ge=1, le=4096, description="requests decoded together")
    max_model_len: int = Field(default=1024, ge=32, description="prompt + response, in tokens")
    kept_prefixes: int | None = Field(
        default=None,
        ge=0,
        le=4096,
        description="ended prompts + responses whose keys and values stay for prompts that begin like them; "
        "absent: as many as max_running; 0: every prompt is computed anew",
    )


class RolloutTable(Table):
    """[rollout]"""

    env_name: Name = Field(
        default="crafter", description="environment, by its name on the task app's plug board"
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="passed to the environment")
    reward_function: Name | None = Field(default=None, description="judges the episodes (docs/plugins.md)")
    policy_name: Name = Field(default="openai", description="policy that asks the gateway")
    policy_config: dict[str, Any] = Field(
        default_factory=dict, description="passed to the policy; what the job sets itself is refused in it"
    )
    max_turns: int = Field(default=50, ge=1, le=10_000, description="decisions an episode may take")
    max_invalid_decisions: int = Field(
        default=5, ge=1, le=10_000, description="then the episode ends as invalid_action"
    )
    timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="of one episode")
    termination_regex: Pattern | None = Field(
        default=None,
        description="an episode ends after a decision whose last 4,096 bytes hold it; Rust's regex syntax",
    )
    termination_target: TerminationTarget = Field(
        default="raw", description="where: in all that the policy wrote, or in the text beside its calls"
    )
    seeds: tuple[Seed, ...] = Field(
        default=(),
        description="train, and warm up, on these worlds alone, in shuffled epochs; absent: ever new ones",
    )
    state_keys: tuple[str, ...] = Field(
        default=(),
        max_length=7,
        description="state keys that are stored with each decision, for `turnwise recredit`; the one that "
        "the estimator needs is stored anyway",
    )
    episodes_per_batch: int = Field(default=64, ge=1, description="episodes of one iteration")
    max_concurrent_rollouts: int = Field(
        default=64, ge=1, description="running at a time, over all task apps"
    )
    temperature: float = Field(default=1.0, gt=0.0, le=10.0, description="of sampling; the trained softmax")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus; below 1 needs consent, see below")
    top_k: int = Field(default=0, ge=0, description="0 keeps the whole vocabulary")
    max_tokens: int = Field(default=32, ge=1, description="tokens a decision may take")
    allow_truncated_sampling: bool = Field(
        default=False,
        description="let training rollouts use top_p < 1 or top_k > 0; the lost mass is not trained",
    )

    @field_validator("seeds")
    @classmethod
    def _each_world_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return _without_twins(seeds, "comes once in an epoch")

    @field_validator("env_config")
    @classmethod
    def _leaves_the_switches(cls, config: dict[str, Any]) -> dict[str, Any]:
        return _refuse_keys(config, _SENT_BY_THE_JOB)

    @field_validator("policy_config")
    @classmethod
    def _leaves_the_job_its_own(cls, config: dict[str, Any]) -> dict[str, Any]:
        return _refuse_keys(config, SET_BY_THE_JOB)


class WarmupTable(Table):
    """[warmup]: supervised steps on a teacher's rollouts before RL."""

    policy_name: Name = Field(default="crafter_teacher", description="the teacher, a policy of the task app")
    policy_config: dict[str, Any] = Field(
        default_factory=dict, description="passed to the teacher; `inference_url` may be any server's"
    )
    # No repr: what stands here by mistake may be the key itself, which no error may repeat.
    api_key_env: str | None = Field(
        default=None,
        pattern=r"^[A-Z_][A-Z0-9_]*$",
        repr=False,
        description="environment variable that holds the key of policy_config.inference_url",
    )
    episodes: int = Field(default=480, ge=1, description="that the teacher plays")
    min_outcome_reward: float = Field(default=0.0, description="episodes below it are not imitated")
    epochs: int = Field(default=8, ge=1, description="passes over its decisions")
    batch_decisions: int = Field(default=256, ge=1, description="decisions of one optimizer step")
    learning_rate: float = Field(default=2e-3, gt=0, description="AdamW's, at its highest")
    weight_decay: float = Field(default=0.01, ge=0, description="AdamW's")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the gradient's norm is clipped to it")

    @field_validator("policy_config")
    @classmethod
    def _leaves_the_switches(cls, config: dict[str, Any]) -> dict[str, Any]:
        return _refuse_keys(config, _SENT_BY_THE_JOB)


class EvaluationTable(Table):
    """[evaluation]"""

    every_n_iters: int = Field(
        default=10, ge=1, description="iterations between evaluations; also at both ends"
    )
    instances: int = Field(
        default=128, ge=1, lt=2**30, description="held-out worlds, or rows of [data], never used in training"
    )
    seeds: tuple[Seed, ...] = Field(
        default=(), description="explicit worlds instead, from 0 to 2**31 - 2; training then avoids them"
    )
    temperature: float | None = Field(
        default=None, ge=0, description="of sampling; 0 is greedy; absent: that of [rollout]"
    )

    @field_validator("seeds")
    @classmethod
    def _each_world_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return _without_twins(seeds, "counts once in a mean")


def _without_twins(seeds: tuple[int, ...], rule: str) -> tuple[int, ...]:
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice, and each world {rule}")
    return seeds


class JobConfig(Table):
    """A whole job. A table that is absent has its defaults; [warmup] absent means no warm-up, [lora] absent
    that all weights are trained, [data] absent that the environment makes its own worlds."""

    job: JobTable = JobTable()
    services: ServicesTable = ServicesTable()
    model: ModelTable
    inference: InferenceTable = InferenceTable()
    rollout: RolloutTable = RolloutTable()
    data: DataTable | None = None
    multi_turn: MultiTurnTable = MultiTurnTable()
    training: TrainingTable = TrainingTable()
    lora: LoraTable | None = None
    algorithm: AlgorithmTable = AlgorithmTable()
    warmup: WarmupTable | None = None
    evaluation: EvaluationTable = EvaluationTable()
    sinks: SinksTable = SinksTable()

    @property
    def evaluation_temperature(self) -> float:
        """What held-out worlds are played at; 0 is greedy."""
        own = self.evaluation.temperature
        return self.rollout.temperature if own is None else own

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
        self._refuse_worlds_that_meet()
        self._refuse_worlds_beside_rows()
        self._refuse_interactions_for_others()
        if self.training.refill_rounds and not self.training.skip_flat_groups:
            raise ValueError("training.refill_rounds needs training.skip_flat_groups = true")
        truncated = self.rollout.top_p < 1.0 or self.rollout.top_k > 0
        if truncated and not self.rollout.allow_truncated_sampling:
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 cuts away probability that training would still "
                "count; set rollout.allow_truncated_sampling = true to accept that"
            )
        return self

    def _refuse_worlds_that_meet(self) -> None:
        if not self.rollout.seeds:
            return  # new worlds keep away from the held-out ones by themselves
        held_out = evaluation_worlds(self.evaluation.instances, self.evaluation.seeds)
        seen = sorted(set(self.rollout.seeds).intersection(held_out))
        if seen:
            raise ValueError(
                f"rollout.seeds and the worlds of the evaluation share {seen[0]}: what was trained on is not "
                "held out; take it from one of the two"
            )

    @property
    def max_decisions(self) -> int:
        """Decisions that an episode may take, by whichever limit is lower."""
        return min(self.rollout.max_turns, self.multi_turn.max_assistant_turns or self.rollout.max_turns)

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

    def _refuse_worlds_beside_rows(self) -> None:
        given = {"rollout.seeds": self.rollout.seeds, "evaluation.seeds": self.evaluation.seeds}
        for key, seeds in given.items():
            if seeds and self.data is not None:
                raise ValueError(f"{key} names worlds, and [data] the rows that are played in their place")
        for key in SET_BY_ROWS if self.data is not None else ():
            if key in self.rollout.env_config:
                raise ValueError(f"rollout.env_config.{key} is that of each row of [data]; leave it out")
