"""The tables [rollout], [warmup], [data] and [multi_turn] of a job TOML: what is played, and by whom."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, field_validator, model_validator

from shared_schemas.context_tools import PUBLISHED, ContextTools, refuse_without_editing
from shared_schemas.patterns import Pattern
from shared_schemas.rollouts import MultiTurn, Name, Seed, TerminationTarget
from shared_schemas.trajectory import MOST_TOKENS, Sampling
from trainer_backend.job.mixture_table import RolloutOnlyTable
from trainer_backend.job.tables import Table

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
    "exact_tokens": "nothing: the gateway tells them",
    "processed_logprobs": "logprobs of [rollout_only]",
    "chat_template_kwargs": "model.chat_template_kwargs",
}

_SAMPLING = ("temperature", "top_p", "top_k")
# What a row of [data] puts into the environment's config.
SET_BY_ROWS = ("prompt", "document_content", "question", "ground_truth")


def _refuse_keys(config: dict[str, Any], set_elsewhere: Mapping[str, str]) -> dict[str, Any]:
    for key in config:
        if key in set_elsewhere:
            raise ValueError(f"{key!r} is set by the job itself; use {set_elsewhere[key]}")
    return config


def without_twins(seeds: tuple[int, ...], rule: str) -> tuple[int, ...]:
    twice = [seed for seed, count in Counter(seeds).items() if count > 1]
    if twice:
        raise ValueError(f"{twice[0]} is given twice, and each world {rule}")
    return seeds


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
        description="state keys (docs/configuration.md) that are stored with each decision, for `turnwise "
        "recredit`; the one that the estimator needs is stored anyway",
    )
    episodes_per_batch: int = Field(default=64, ge=1, le=1_000_000, description="episodes of one iteration")
    max_concurrent_rollouts: int = Field(
        default=64, ge=1, description="running at a time, over all task apps"
    )
    temperature: float = Field(default=1.0, gt=0.0, le=10.0, description="of sampling; the trained softmax")
    top_p: float = Field(default=1.0, gt=0.0, le=1.0, description="nucleus; below 1 needs consent, see below")
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS, description="0 keeps the whole vocabulary")
    max_tokens: int = Field(default=32, ge=1, description="tokens a decision may take")
    allow_truncated_sampling: bool = Field(
        default=False,
        description="let training rollouts use top_p < 1 or top_k > 0; the lost mass is not trained",
    )

    def sampling_of(self, fixed: RolloutOnlyTable | None = None) -> Sampling:
        """How the actor draws tokens in training; or how a fixed policy does, which inherits its settings."""
        own = {} if fixed is None else fixed.model_dump(include=set(_SAMPLING), exclude_none=True)
        inherited = {key: getattr(self, key) for key in _SAMPLING}
        return Sampling(max_tokens=self.max_tokens, **(inherited | own))

    @field_validator("seeds")
    @classmethod
    def _each_world_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        return without_twins(seeds, "comes once in an epoch")

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
    episodes: int = Field(default=480, ge=1, le=1_000_000, description="that the teacher plays")
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


class DataTable(Table):
    """[data]"""

    path: Path = Field(
        description="a .jsonl or .parquet file, or a folder as `datasets` or the hub have it (docs/data.md)"
    )
    split: str = Field(default="train", min_length=1, description="to train on; of a lone file its name only")
    evaluation_path: Path | None = Field(
        default=None, description="file or folder of the held-out rows; absent: path"
    )
    evaluation_split: str | None = Field(
        default=None,
        min_length=1,
        description="the held-out rows; absent: test, where evaluation_path is given",
    )
    held_out_share: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="instead of both: about this share of split is held out, by a hash of held_out_seed and "
        "a row's id",
    )
    held_out_seed: int = Field(
        default=0, ge=0, lt=2**31, description="jobs that share it hold out, and evaluate on, the same rows"
    )
    shuffle: bool = Field(
        default=True, description="each epoch in an order of its own; false: each in that of the file"
    )
    interaction: Name | None = Field(
        default=None,
        description="answers as the user where a row names no interaction; its kwargs are then the row's "
        "`query` and `ground_truth`, unless the row has its own",
    )

    @property
    def held_out(self) -> str:
        """Which rows are held out, where a person reads it."""
        if self.held_out_share is not None:
            share = f"{self.held_out_share:g} of {self.split} of {self.path}"
            return f"{share}, held_out_seed {self.held_out_seed}"
        return f"{self.held_out_split} of {self.evaluation_path or self.path}"

    @property
    def held_out_split(self) -> str:
        """The split of the held-out rows, where they are one."""
        return self.evaluation_split or "test"

    @model_validator(mode="after")
    def _one_way_to_hold_out(self) -> "DataTable":
        named = self.evaluation_path is not None or self.evaluation_split is not None
        if named == (self.held_out_share is not None):
            found = ", and not both" if named else "; found none"
            raise ValueError(
                "held-out rows come from evaluation_split or evaluation_path, or are a held_out_share of "
                f"split{found}"
            )
        if self.evaluation_path is None and self.evaluation_split == self.split:
            raise ValueError(
                f"evaluation_split is {self.split!r}, which is trained on; did you mean held_out_share?"
            )
        return self


class MultiTurnTable(Table):
    """[multi_turn]"""

    enable: bool = Field(default=False, description="play conversations; the other keys need it")
    interaction_config_path: Path | None = Field(
        default=None,
        description="the YAML or TOML file of interactions, for the task app that the job starts "
        "(docs/plugins.md)",
    )
    max_user_turns: int | None = Field(
        default=None, ge=0, le=10_000, description="answers of the user in an episode; absent: any number"
    )
    max_assistant_turns: int | None = Field(
        default=None, ge=1, le=10_000, description="decisions in an episode; absent: rollout.max_turns"
    )
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="tokens that are sampled in an episode, all decisions together"
    )
    max_model_length: int = Field(
        default=8192,
        ge=32,
        description="prompt and answer together, in tokens",
    )
    context_length_penalty: float = Field(
        default=-1.0, le=0.0, description="reward of the last decision before a prompt that does not fit"
    )
    statelm_enabled: bool = Field(
        default=False,
        description="let the model edit its context (docs/conversations.md)",
    )
    context_tools: ContextTools = Field(
        default=PUBLISHED,
        min_length=1,
        description="what it edits it with (docs/conversations.md)",
    )

    def max_decisions(self, max_turns: int) -> int:
        """Decisions that an episode may take, by whichever limit is lower.

        Args:
            max_turns: the limit of [rollout].
        """
        return min(max_turns, self.max_assistant_turns or max_turns)

    def for_requests(self) -> MultiTurn:
        """Return the part of the table that every rollout request contains."""
        if not self.enable:
            return MultiTurn()
        return MultiTurn(
            statelm_enabled=self.statelm_enabled,
            context_tools=self.context_tools,
            max_user_turns=self.max_user_turns,
            max_episode_tokens=self.max_episode_tokens,
            context_length_penalty=self.context_length_penalty,
        )

    @model_validator(mode="after")
    def _keys_have_an_effect(self) -> "MultiTurnTable":
        # Not what is given, but what differs: the job that a run writes down gives every key.
        fields = type(self).model_fields
        given = [name for name in fields if getattr(self, name) != fields[name].default]
        if given and not self.enable:
            raise ValueError(
                f"multi_turn.{given[0]} is given, and multi_turn.enable is false: the run would ignore it"
            )
        refuse_without_editing(self.context_tools, statelm_enabled=self.statelm_enabled)
        return self
