"""The tables [rollout], [warmup], [data] and [multi_turn] of a job: episodes, and the policies in them."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from shared_schemas.rollouts import ConversationKeys, InteractionName, LimitKeys, MultiTurn, Name, Seed
from shared_schemas.trajectory import TRUNCATING, Sampling
from trainer_backend.core.keys import Table
from trainer_backend.job.mixture_table import RolloutOnlyTable, TrainedSamplingKeys

# The sampling keys of [rollout]. A [[rollout_only]] may set some of them for its own policy.
SAMPLING_KEYS = tuple(name for name in Sampling.model_fields if name != "seed")
# Keys that the job sends with every rollout, each with the place to set it. A config may not contain them:
# its values would have to agree with those of the job in every stage.
_JOB_KEYS = {"step_rewards": "the step_rewards_* keys of [training]"}
# Settings that the job gives to policies, each with the key to use instead. If rollout.policy_config
# contained them, they would bypass the job's checks, training and seeds.
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
    """Return a validator that refuses these keys in a config; its error names the key to use instead."""

    def check(config: dict[str, Any]) -> dict[str, Any]:
        for key in config:
            if key in set_elsewhere:
                raise ValueError(f"{key!r} is set by the job itself; use {set_elsewhere[key]}")
        return config

    return AfterValidator(check)


def refuse_repeats(rule: str) -> AfterValidator:
    """Return a validator that refuses repeated seeds; its error ends with `each world`, then `rule`."""

    def check(seeds: tuple[int, ...]) -> tuple[int, ...]:
        duplicates = [seed for seed, count in Counter(seeds).items() if count > 1]
        if duplicates:
            raise ValueError(f"{duplicates[0]} is given twice, and each world {rule}")
        return seeds

    return AfterValidator(check)


class PlayKeys(Table):
    """The environment, and the policy that acts in it."""

    env_name: Name = "crafter"
    """name of the environment at the task app"""
    env_config: Annotated[dict[str, Any], refuse_keys(_JOB_KEYS)] = Field(default_factory=dict)
    """settings that are passed to the environment"""
    reward_function: Name | None = None
    """name of the function at the task app that scores each episode (docs/plugins.md); absent: none"""
    policy_name: Name = "openai"
    """name of the task app's policy that asks the gateway for each decision"""
    policy_config: Annotated[dict[str, Any], refuse_keys(SET_BY_THE_JOB)] = Field(default_factory=dict)
    """settings that are passed to the policy; keys that the job sets itself are refused"""
    max_turns: int = Field(default=50, ge=1, le=10_000)
    """maximum number of decisions in an episode"""


class EpisodesKeys(LimitKeys, PlayKeys):
    """Which episodes are played, and how many."""

    seeds: Annotated[tuple[Seed, ...], refuse_repeats("comes once in an epoch")] = ()
    """seeds of the only worlds that training and warm-up play; each epoch plays all of them in a new order;
    absent: always new worlds"""
    state_keys: tuple[str, ...] = Field(default=(), max_length=7)
    """state keys to store with each decision, so that `turnwise recredit` can use them (docs/configuration.md
    lists them). The state key that the job's estimator uses is always stored"""
    episodes_per_batch: int = Field(default=64, ge=1, le=1_000_000)
    """number of episodes in an iteration"""
    max_concurrent_rollouts: int = Field(default=64, ge=1)
    """maximum number of rollouts that run at the same time, on all task apps together"""


class RolloutTable(TrainedSamplingKeys, EpisodesKeys):
    """[rollout]: the episodes that are played, and the sampling options of the actor."""

    max_tokens: int = Field(default=32, ge=1)
    """maximum number of tokens that are sampled for a decision"""
    allow_truncated_sampling: bool = Field(
        default=False,
        description=f"allow truncation ({', '.join(TRUNCATING)}) in training rollouts, although training "
        "still counts the probability of tokens that are then never sampled",
    )

    @property
    def forces_call(self) -> bool:
        """Whether every decision must be a tool call. If so, the prompt ends with the beginning of a call."""
        return self.policy_config.get("tool_choice") == "required"

    def choose_sampling(self, fixed: RolloutOnlyTable | None = None) -> Sampling:
        """Return the sampling options of the actor, or of the policy `fixed`.

        A fixed policy has the actor's value for each option that it does not set.
        """
        keys = set(SAMPLING_KEYS)
        own = {} if fixed is None else fixed.model_dump(include=keys, exclude_none=True)
        return Sampling(**self.model_dump(include=keys) | own)


class WarmupTable(Table):
    """[warmup]: supervised training on the episodes of a teacher, before RL."""

    policy_name: Name = "crafter_teacher"
    """name of the teacher, a policy of the task app"""
    policy_config: Annotated[dict[str, Any], refuse_keys(_JOB_KEYS)] = Field(default_factory=dict)
    """settings that are passed to the teacher; `inference_url` among them may be the URL of any server"""
    # No repr: a key pasted here by mistake must not appear in an error.
    api_key_env: str | None = Field(default=None, pattern=r"^[A-Z_][A-Z0-9_]*$", repr=False)
    """name of the environment variable that contains the API key for policy_config.inference_url"""
    episodes: int = Field(default=480, ge=1, le=1_000_000)
    """number of episodes that the teacher plays"""
    min_outcome_reward: float = 0.0
    """only episodes with at least this outcome reward are imitated"""
    epochs: int = Field(default=8, ge=1)
    """number of passes over the teacher's decisions"""
    batch_decisions: int = Field(default=256, ge=1)
    """number of decisions in an optimizer step"""
    learning_rate: float = Field(default=2e-3, gt=0)
    """peak learning rate of AdamW"""
    weight_decay: float = Field(default=0.01, ge=0)
    """weight decay of AdamW"""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """a gradient with a larger norm is scaled down to this norm (clipping)"""


class DataTable(Table):
    """[data]: the data set whose rows the episodes play."""

    path: Path
    """a .jsonl or .parquet file, or a folder laid out as for `datasets` (docs/data.md)"""
    split: str = Field(default="train", min_length=1)
    """name of the split to train on. If `path` is a single file, its rows get this name"""
    evaluation_path: Path | None = None
    """file or folder with the held-out rows; absent: they are in `path`"""
    evaluation_split: str | None = Field(default=None, min_length=1)
    """name of the split with the held-out rows; if only evaluation_path is given: `test`"""
    held_out_share: float | None = Field(default=None, gt=0, lt=1)
    """instead of evaluation_path and evaluation_split: hold out about this share of the rows of `split`.
    Whether a row is held out depends on a hash of held_out_seed and the row's `id`. If the row has no `id`,
    its prompt and document are hashed instead"""
    held_out_seed: int = Field(default=0, ge=0, lt=2**31)
    """seed for the choice of held-out rows; jobs with the same data and the same seed hold out the same
    rows"""
    shuffle: bool = True
    """play the rows in a new random order in each epoch; false: in the order of the file"""
    interaction: InteractionName | None = None
    """name of the interaction (simulated user) for rows that name none. It gets the arguments in the row. If
    the row has none, its arguments are `query` (the row's question) and `ground_truth`"""

    @property
    def held_out(self) -> str:
        """A description of the held-out rows, for messages."""
        if self.held_out_share is not None:
            share = f"{self.held_out_share:g} of {self.split} of {self.path}"
            return f"{share}, held_out_seed {self.held_out_seed}"
        return f"{self.held_out_split} of {self.evaluation_path or self.path}"

    @property
    def held_out_split(self) -> str:
        """The name of the split that contains the held-out rows."""
        return self.evaluation_split or "test"


class InteractionKeys(Table):
    """Keys that turn on conversations and name the interactions, the simulated users that answer in them."""

    enable: bool = False
    """play conversations; the other keys of [multi_turn] need this"""
    interaction_config_path: Path | None = None
    """YAML or TOML file that lists interactions, for the task app that the job starts (docs/plugins.md)"""
    interaction_config_sha256: tuple[str, ...] = Field(default=(), max_length=10_000)
    """SHA-256 of the file of interaction_config_path, and of the modules in its folder that it names. A run
    records them when it begins, and refuses files that have changed since"""


class MultiTurnTable(ConversationKeys, InteractionKeys):
    """[multi_turn]: conversations, their limits, and the interactions that answer in them."""

    max_assistant_turns: int | None = Field(default=None, ge=1, le=10_000)
    """maximum number of decisions in a conversation; rollout.max_turns also limits them; absent: no other
    limit"""
    max_model_length: int = Field(default=8192, ge=32)
    """maximum number of tokens in a prompt and its answer together"""

    def max_decisions(self, max_turns: int) -> int:
        """Return the maximum number of decisions: the lower one of `max_turns` and max_assistant_turns."""
        return min(max_turns, self.max_assistant_turns or max_turns)

    def for_requests(self) -> MultiTurn:
        """Return the keys that every rollout request contains; they have defaults if `enable` is false."""
        if not self.enable:
            return MultiTurn()
        return MultiTurn(**self.model_dump(include=set(MultiTurn.model_fields)))
