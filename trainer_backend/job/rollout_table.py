"""The tables [rollout], [warmup], [data] and [multi_turn] of a job: the episodes and their players."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shared_schemas.rollouts import ConversationKeys, InteractionName, LimitKeys, MultiTurn, Name, Seed
from shared_schemas.trajectory import TRUNCATING, Sampling
from trainer_backend.core.keys import Table
from trainer_backend.job.mixture_table import RolloutOnlyTable, TrainedSamplingKeys

# The keys of sampling in [rollout]; [[rollout_only]] may set some of them for its own policy.
SAMPLING_KEYS = tuple(name for name in Sampling.model_fields if name != "seed")
# The job sends these with every rollout; if a config has them too, both must agree in every stage.
_JOB_KEYS = {"step_rewards": "the step_rewards_* keys of [training]"}
# Settings that the job gives to policies, and the key for each. In rollout.policy_config they would bypass
# the job's checks, training and seeds.
SET_BY_THE_JOB = {
    **_JOB_KEYS,
    **{name: f"rollout.{name}" for name in SAMPLING_KEYS},
    "max_model_length": "multi_turn.max_model_length",
    "seed": "job.seed",
    "model": "job.name",
    "inference_url": "services.gateway_host and services.gateway_port",
    "exact_tokens": "nothing: the gateway tells them",
    "processed_logprobs": "logprobs of [rollout_only]",
    "chat_template_kwargs": "model.chat_template_kwargs",
}

# The keys that a row of [data] sets in the environment's config.
SET_BY_ROWS = ("prompt", "document_content", "question", "ground_truth")


def refuse_keys(set_elsewhere: Mapping[str, str]) -> AfterValidator:
    """Make a validator that refuses these keys of a config, and names the job's key for each."""

    def check(config: dict[str, Any]) -> dict[str, Any]:
        for key in config:
            if key in set_elsewhere:
                raise ValueError(f"{key!r} is set by the job itself; use {set_elsewhere[key]}")
        return config

    return AfterValidator(check)


def refuse_repeats(rule: str) -> AfterValidator:
    """Make a validator that refuses a world which is given twice; `rule` ends the sentence."""

    def check(seeds: tuple[int, ...]) -> tuple[int, ...]:
        duplicates = [seed for seed, count in Counter(seeds).items() if count > 1]
        if duplicates:
            raise ValueError(f"{duplicates[0]} is given twice, and each world {rule}")
        return seeds

    return AfterValidator(check)


class PlayKeys(Table):
    """The environment, and the policy that plays it."""

    env_name: Name = "crafter"
    """environment, by its name at the task app"""
    env_config: Annotated[dict[str, Any], refuse_keys(_JOB_KEYS)] = Field(default_factory=dict)
    """passed to the environment"""
    reward_function: Name | None = None
    """scores the episodes (docs/plugins.md)"""
    policy_name: Name = "openai"
    """policy that calls the gateway"""
    policy_config: Annotated[dict[str, Any], refuse_keys(SET_BY_THE_JOB)] = Field(default_factory=dict)
    """passed to the policy; keys that the job sets itself are refused"""
    max_turns: int = Field(default=50, ge=1, le=10_000)
    """the most decisions of an episode"""


class EpisodesKeys(LimitKeys, PlayKeys):
    """The choice of episodes, and their number."""

    seeds: Annotated[tuple[Seed, ...], refuse_repeats("comes once in an epoch")] = ()
    """train and warm up only on these worlds, in shuffled epochs; absent: always new worlds"""
    state_keys: tuple[str, ...] = Field(default=(), max_length=7)
    """state keys (docs/configuration.md) to store with each decision for `turnwise recredit`; the estimator's
    own is always stored"""
    episodes_per_batch: int = Field(default=64, ge=1, le=1_000_000)
    """episodes per iteration"""
    max_concurrent_rollouts: int = Field(default=64, ge=1)
    """rollouts that run at a time on all task apps"""


class RolloutTable(TrainedSamplingKeys, EpisodesKeys):
    """[rollout]"""

    max_tokens: int = Field(default=32, ge=1)
    """maximum number of tokens per decision"""
    allow_truncated_sampling: bool = Field(
        default=False,
        description=f"allow truncation ({', '.join(TRUNCATING)}) in training rollouts; the lost mass is not "
        "trained",
    )

    @property
    def forces_call(self) -> bool:
        """Whether every decision must be a call; then the prompt ends with the beginning of the call."""
        return self.policy_config.get("tool_choice") == "required"

    def choose_sampling(self, fixed: RolloutOnlyTable | None = None) -> Sampling:
        """Return the actor's sampling options; for a fixed policy, its own options replace the actor's."""
        keys = set(SAMPLING_KEYS)
        own = {} if fixed is None else fixed.model_dump(include=keys, exclude_none=True)
        return Sampling(**self.model_dump(include=keys) | own)


class WarmupTable(Table):
    """[warmup]: supervised steps on a teacher's rollouts before RL."""

    policy_name: Name = "crafter_teacher"
    """the teacher, a policy of the task app"""
    policy_config: Annotated[dict[str, Any], refuse_keys(_JOB_KEYS)] = Field(default_factory=dict)
    """passed to the teacher; `inference_url` may name any server"""
    # No repr: a key pasted here by mistake must not appear in an error.
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$", repr=False)
    """environment variable that holds the key of policy_config.inference_url"""
    episodes: int = Field(default=480, ge=1, le=1_000_000)
    """episodes that the teacher plays"""
    min_outcome_reward: float = 0.0
    """episodes with a lower outcome reward are not imitated"""
    epochs: int = Field(default=8, ge=1)
    """passes over the teacher's decisions"""
    batch_decisions: int = Field(default=256, ge=1)
    """decisions per optimizer step"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """highest learning rate of AdamW"""
    weight_decay: float = Field(default=0.01, ge=0)
    """weight decay of AdamW"""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """limit of the gradient's norm (clipping)"""


class DataTable(Table):
    """[data]"""

    path: Path
    """a .jsonl or .parquet file, or a folder laid out as for `datasets` (docs/data.md)"""
    split: str = Field(default="train", min_length=1)
    """split for training; for a lone file its name"""
    evaluation_path: Path | None = None
    """file or folder of the held-out rows; absent: path"""
    evaluation_split: str | None = Field(default=None, min_length=1)
    """split of the held-out rows; absent: test, if evaluation_path is given"""
    held_out_share: float | None = Field(default=None, gt=0, lt=1)
    """instead of evaluation_path and evaluation_split: hold out about this share of `split`, chosen by a hash
    of held_out_seed and a row's own id; a row without an id is hashed by what it asks"""
    held_out_seed: int = Field(default=0, ge=0, lt=2**31)
    """jobs with equal seeds hold out the same rows"""
    shuffle: bool = True
    """give each epoch its own order; false: keep the order of the file"""
    interaction: InteractionName | None = None
    """the user's interaction for rows that name none; its kwargs are then the row's `query` and
    `ground_truth`, unless the row has its own"""

    @property
    def held_out(self) -> str:
        """A description of the held-out rows for messages."""
        if self.held_out_share is not None:
            share = f"{self.held_out_share:g} of {self.split} of {self.path}"
            return f"{share}, held_out_seed {self.held_out_seed}"
        return f"{self.held_out_split} of {self.evaluation_path or self.path}"

    @property
    def held_out_split(self) -> str:
        """The split of the held-out rows."""
        return self.evaluation_split or "test"


class InteractionKeys(Table):
    """Keys that turn conversations on and name the interactions that answer in them."""

    enable: bool = False
    """play conversations; the other keys need it"""
    interaction_config_path: Path | None = None
    """the YAML or TOML file of interactions, for the task app that the job starts (docs/plugins.md)"""
    interaction_config_sha256: tuple[str, ...] = Field(default=(), max_length=10_000)
    """SHA-256 of interaction_config_path and of modules in its folder that it names; a run refuses others"""


class MultiTurnTable(ConversationKeys, InteractionKeys):
    """[multi_turn]"""

    max_assistant_turns: int | None = Field(default=None, ge=1, le=10_000)
    """decisions per episode; absent: rollout.max_turns"""
    max_model_length: int = Field(default=8192, ge=32)
    """prompt and answer together, in tokens"""

    def max_decisions(self, max_turns: int) -> int:
        """Return the most decisions of an episode: the lower one of `max_turns` and this table's limit."""
        return min(max_turns, self.max_assistant_turns or max_turns)

    def for_requests(self) -> MultiTurn:
        """Return the part of the table that every rollout request contains."""
        if not self.enable:
            return MultiTurn()
        return MultiTurn(**self.model_dump(include=set(MultiTurn.model_fields)))
