"""The tables of a job TOML. Every key is here, with its default and its bounds, and nowhere else.

`trainer_backend.job.load_job` reads a file into `JobConfig`; docs/configuration.md is checked against it.
"""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import ConfigDict, Field, SecretStr, field_validator, model_validator

from shared_schemas.base import Body
from shared_schemas.rewards import EventRewardsKind, StepRewards, StepRewardsMode
from shared_schemas.rollouts import Name, Seed

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
    "seed": "job.seed",
    "model": "job.name",
    "inference_url": "services.gateway_host and services.gateway_port",
}


def _refuse_keys(config: dict[str, Any], set_elsewhere: Mapping[str, str]) -> dict[str, Any]:
    for key in config:
        if key in set_elsewhere:
            raise ValueError(f"{key!r} is set by the job itself; use {set_elsewhere[key]}")
    return config


class Table(Body):
    """A table of the job; no number in it may be infinite or NaN."""

    model_config = ConfigDict(allow_inf_nan=False)


class JobTable(Table):
    """[job]"""

    name: str = Field(
        default="job", pattern=r"^[A-Za-z0-9._-]+$", max_length=60, description="first part of `model`"
    )
    seed: int = Field(
        default=0, ge=0, lt=2**31, description="every world, sampling and shuffle seed follows from it"
    )
    runs_dir: Path = Field(default=Path("runs"), description="where run directories are made")


class ServicesTable(Table):
    """[services]"""

    task_url: tuple[str, ...] = Field(
        default=(), description="task apps, one URL or a list; absent: the job starts one of its own"
    )
    task_api_key: SecretStr | None = Field(
        default=None, description="their key; absent: the environment variable ENVIRONMENT_API_KEY"
    )
    gateway_host: str = Field(
        default="127.0.0.1", description="address that the job's own gateway listens on"
    )
    gateway_port: int = Field(default=0, ge=0, le=65535, description="0 takes a free port")
    request_timeout_s: float = Field(default=60.0, gt=0, description="of one control request to a task app")
    iteration_timeout_s: float = Field(default=1800.0, gt=0, description="of collecting one iteration")


class ModelTable(Table):
    """[model]"""

    preset: str | None = Field(default=None, description="a small model built from its config; names below")
    path: Path | None = Field(default=None, description="a local Hugging Face folder")
    vocab_size: int = Field(
        default=1024,
        ge=300,
        le=65536,
        description="of the tokenizer that a preset trains on the job's prompts",
    )

    @model_validator(mode="after")
    def _one_source(self) -> "ModelTable":
        if (self.preset is None) == (self.path is None):
            raise ValueError("exactly one of 'preset' and 'path' must be given")
        return self


class InferenceTable(Table):
    """[inference]"""

    threads: int = Field(default=1, ge=1, le=256, description="torch threads while rollouts are collected")
    max_running: int = Field(default=64, ge=1, le=4096, description="requests decoded together")
    max_model_len: int = Field(default=1024, ge=32, description="prompt + response, in tokens")


class RolloutTable(Table):
    """[rollout]"""

    env_name: Name = Field(
        default="crafter", description="environment, by its name on the task app's plug board"
    )
    env_config: dict[str, Any] = Field(default_factory=dict, description="passed to the environment")
    policy_name: Name = Field(default="openai", description="policy that asks the gateway")
    policy_config: dict[str, Any] = Field(
        default_factory=dict, description="passed to the policy; what the job sets itself is refused in it"
    )
    max_turns: int = Field(default=50, ge=1, le=10_000, description="decisions an episode may take")
    max_invalid_decisions: int = Field(
        default=5, ge=1, le=10_000, description="then the episode ends as invalid_action"
    )
    timeout_s: float = Field(default=600.0, gt=0, le=86_400, description="of one episode")
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

    @field_validator("env_config")
    @classmethod
    def _leaves_the_switches(cls, config: dict[str, Any]) -> dict[str, Any]:
        return _refuse_keys(config, _SENT_BY_THE_JOB)

    @field_validator("policy_config")
    @classmethod
    def _leaves_the_job_its_own(cls, config: dict[str, Any]) -> dict[str, Any]:
        return _refuse_keys(config, SET_BY_THE_JOB)


class TrainingTable(Table):
    """[training]"""

    iterations: int = Field(default=20, ge=0, description="of collecting, crediting and updating")
    group_size: int = Field(default=8, ge=1, description="G: episodes that share a start")
    learning_rate: float = Field(default=5e-4, gt=0, description="AdamW's, at its highest")
    learning_rate_final: float = Field(
        default=0.1, ge=0, le=1, description="share of learning_rate at the last update"
    )
    learning_rate_rise: float = Field(
        default=0.0, ge=0, lt=1, description="share of the run over which it rises from 0"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="AdamW's")
    max_grad_norm: float = Field(default=1.0, gt=0, description="the gradient's norm is clipped to it")
    update_passes: int = Field(
        default=2, ge=1, description="times that an iteration's decisions are gone through"
    )
    batch_decisions: int = Field(default=512, ge=1, description="decisions of one optimizer step")
    row_tokens: int = Field(default=192, ge=16, description="tokens of a packed row")
    micro_batch_tokens: int = Field(
        default=4096,
        ge=64,
        description="tokens of one forward and backward; small ones stay in a CPU's cache",
    )
    clip_low: float = Field(default=0.2, gt=0, lt=1, description="ratios below 1 - clip_low are held")
    clip_high: float = Field(default=0.25, gt=0, description="ratios above 1 + clip_high are held")
    entropy_coef: float = Field(default=0.003, ge=0, description="weight of the entropy bonus")
    kl_coef: float = Field(
        default=0.0, ge=0, description="weight of the KL to the model that RL started from"
    )
    kl_kind: Literal["k2", "k3"] = Field(default="k3", description="estimator of that KL")
    behaviour_weight_cap: float = Field(default=2.0, ge=1, description="truncation of proximal / behaviour")
    aggregation: Literal["token_mean", "decision_mean", "episode_equal"] = Field(
        default="token_mean",
        description="what counts the same in an optimizer step: tokens, decisions, episodes",
    )
    threads: int = Field(default=2, ge=1, le=256, description="torch threads while the policy is updated")
    checkpoint_every: int = Field(default=5, ge=1, description="iterations between checkpoints")
    keep_checkpoints: int = Field(default=2, ge=1, description="newest checkpoints kept beside the best one")
    step_rewards_enabled: bool = Field(default=False, description="master switch of decision rewards")
    step_rewards_mode: StepRewardsMode = Field(default="off", description="where r_t comes from")
    event_rewards_kind: EventRewardsKind = Field(
        default="unique", description="count first unlocks, or every achievement whose counter rose"
    )
    step_rewards_beta: float = Field(default=0.0, ge=0, description="bonus beta * (T - t) for a first unlock")
    step_rewards_indicator_lambda: float = Field(
        default=0.0, ge=0, description="bonus for a decision with a first unlock"
    )
    step_rewards_horizon: Literal["realised", "max_decisions"] = Field(
        default="realised", description="T in beta * (T - t): the episode's length, or max_turns (causal)"
    )

    @property
    def step_rewards(self) -> StepRewards:
        """The switches in the form that reaches the task app."""
        return StepRewards(
            enabled=self.step_rewards_enabled,
            mode=self.step_rewards_mode,
            kind=self.event_rewards_kind,
            indicator_lambda=self.step_rewards_indicator_lambda,
            step_beta=self.step_rewards_beta,
        )


class AlgorithmTable(Table):
    """[algorithm]"""

    advantage: str = Field(default="stepwise", description="an estimator of the plug board")
    loss: str = Field(default="clipped", description="a loss of the plug board")
    gamma: float = Field(default=0.97, ge=0, le=1, description="discount per decision")


class WarmupTable(Table):
    """[warmup]: supervised steps on a teacher's rollouts before RL."""

    policy_name: Name = Field(default="crafter_teacher", description="the teacher, a policy of the task app")
    policy_config: dict[str, Any] = Field(default_factory=dict, description="passed to the teacher")
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
    instances: int = Field(default=128, ge=1, lt=2**30, description="held-out worlds, never used in training")
    seeds: tuple[Seed, ...] = Field(
        default=(), description="explicit worlds instead, from 0 to 2**31 - 2; training then avoids them"
    )
    temperature: float | None = Field(default=None, gt=0, description="absent: that of [rollout]")

    @field_validator("seeds")
    @classmethod
    def _each_world_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        twice = [seed for seed, count in Counter(seeds).items() if count > 1]
        if twice:
            raise ValueError(f"{twice[0]} is given twice, and each world counts once in a mean")
        return seeds


class JobConfig(Table):
    """A whole job. A table that is absent has its defaults; [warmup] absent means no warm-up."""

    job: JobTable = JobTable()
    services: ServicesTable = ServicesTable()
    model: ModelTable
    inference: InferenceTable = InferenceTable()
    rollout: RolloutTable = RolloutTable()
    training: TrainingTable = TrainingTable()
    algorithm: AlgorithmTable = AlgorithmTable()
    warmup: WarmupTable | None = None
    evaluation: EvaluationTable = EvaluationTable()

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
        truncated = self.rollout.top_p < 1.0 or self.rollout.top_k > 0
        if truncated and not self.rollout.allow_truncated_sampling:
            raise ValueError(
                "rollout.top_p < 1 or rollout.top_k > 0 cuts away probability that training would still "
                "count; set rollout.allow_truncated_sampling = true to accept that"
            )
        return self
