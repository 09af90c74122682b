"""The wire types of the rollout service.

The trainer chooses the ids, so a repeated request is harmless: the same id with the same body means the same
rollout. The same id with another body is refused with status 409.
"""

import json
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    JsonValue,
    SecretStr,
    ValidationInfo,
    field_validator,
    model_validator,
)

from shared_schemas.base import Body, Count, did_you_mean
from shared_schemas.patterns import Pattern
from shared_schemas.rewards import WIRE_NAMES, StepRewards
from shared_schemas.trajectory import Trajectory

Id = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/-]+$")]
Name = Annotated[str, Field(max_length=200)]
# Id of the answering process, which changes with a restart.
InstanceId = Annotated[str, Field(min_length=1, max_length=200)]
# Strict, because `false`, "7" and 7.0 are mistakes that would start an unintended world.
Seed = Annotated[int, Field(ge=0, lt=2**31 - 1, strict=True)]

Turn = Annotated[int, Field(ge=1, le=10_000, strict=True)]


def _fits_a_header(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key is made of printable ASCII characters")
    return key


InferenceKey = Annotated[SecretStr, Field(max_length=500), AfterValidator(_fits_a_header)]

MAX_GROUND_TRUTH_BYTES = 100_000


def _check_size(value: JsonValue) -> JsonValue:
    if (size := len(json.dumps(value, allow_nan=False))) > MAX_GROUND_TRUTH_BYTES:
        raise ValueError(f"as JSON it has {size} bytes; at most {MAX_GROUND_TRUTH_BYTES} are allowed")
    return value


GroundTruth = Annotated[JsonValue, AfterValidator(_check_size)]

# Arguments that the service itself passes to start_interaction and generate_response.
_RESERVED_ARGUMENTS = frozenset({"self", "instance_id", "messages", "name"})


def _refuse_reserved(kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if reserved := sorted(_RESERVED_ARGUMENTS & kwargs.keys()):
        raise ValueError(f"{reserved[0]!r} is an argument that the interaction gets anyway; rename it")
    _check_size(kwargs)
    return kwargs


InteractionName = Annotated[str, Field(min_length=1, max_length=200)]
InteractionKwargs = Annotated[dict[str, JsonValue], AfterValidator(_refuse_reserved)]


class Start(Body):
    """Where an episode starts: in the world of a seed, or in the state that `snapshot` contains.

    A snapshot, such as from POST /env/snapshot, must come from the same environment and config. Its world,
    counters and history continue; turns and limits count from here. `parent_…` fields are only recorded.
    """

    # One class and not a union, because the names of a union's members would appear in the paths of errors.
    seed: Seed | None = None
    snapshot: str | None = Field(default=None, min_length=1)
    draws_seed: Seed | None = Field(
        default=None,
        description="with a snapshot: its world's further draws come from a generator of this seed, and not "
        "from the one in the snapshot",
    )
    parent_rollout_id: Id | None = None
    parent_turn: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> "Start":
        if (self.seed is None) == (self.snapshot is None):
            raise ValueError("give either seed or snapshot")
        if self.snapshot is None and (self.parent_rollout_id, self.parent_turn) != (None, None):
            raise ValueError("a parent goes with a snapshot, not with a seed")
        if self.snapshot is None and self.draws_seed is not None:
            raise ValueError("draws_seed goes with a snapshot; those of a seed's world come from it")
        return self


class EnvSpec(Body):
    env_name: Name
    config: dict[str, Any] = Field(default_factory=dict)


class PolicySpec(Body):
    """The policy; `inference_key` is sent to `inference_url` as a Bearer token, never stored or logged."""

    policy_name: Name
    config: dict[str, Any] = Field(default_factory=dict)
    seed: Seed | None = Field(
        default=None, description="goes into a config that has such a field and does not set it"
    )
    inference_key: InferenceKey | None = None


class InteractionSpec(Body):
    """Names the interaction (simulated user) that answers the policy; the operator's file defines the names.

    `kwargs` come from the data row (`interaction_kwargs` without the name). They may contain the right
    answer, so they are never shown to the policy or written to a log.
    """

    name: InteractionName | None = Field(
        default=None, description="optional if the file has only one interaction"
    )
    kwargs: InteractionKwargs = Field(default_factory=dict, repr=False)


def default_interaction_name(class_name: str) -> str:
    """Return the default name of an interaction class: `gsm8k` for `package.module.Gsm8kInteraction`."""
    return class_name.rpartition(".")[2].removesuffix("Interaction").lower()


Decisions = Annotated[int, Field(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0, le=86_400)]
Penalty = Annotated[float, Field(le=0.0)]
TerminationTarget = Literal["raw", "text"]


class CostKeys(Body):
    """Settings that change the rewards of costly decisions. Captured agents (docs/captures.md) have none."""

    invalid_action_penalty: Penalty = Field(
        default=0.0, description="reward of each refused decision, added to what it earns"
    )


class LimitKeys(CostKeys):
    """Limits that end an episode, and costs of decisions. [rollout], requests and tasks have these keys."""

    max_invalid_decisions: Decisions = Field(default=5, description="then the episode ends as invalid_action")
    timeout_s: Seconds = Field(default=600.0, description="time limit of an episode")
    termination_regex: Pattern | None = Field(
        default=None,
        description="ends an episode after a decision whose last 4,096 bytes match; Rust's regex syntax",
    )
    termination_target: TerminationTarget = Field(
        default="raw",
        description="text to match: all that the policy wrote, or only the text outside its calls",
    )

    def dump_limits(self) -> dict[str, Any]:
        """Return the values of the fields of LimitKeys, without fields of derived classes."""
        return self.model_dump(include=set(LimitKeys.model_fields))


class DecisionLimit(Body):
    """The largest number of decisions of an episode; a job derives it from several of its keys."""

    max_decisions: Decisions = 50


# Keep the order of the bases: the digests of stored tasks depend on the order of the fields.
class RolloutLimits(LimitKeys, DecisionLimit):
    """All limits of an episode, as a rollout request contains them."""


# Tools with which a model edits its context; task_app/episode implements them. The published tools are
# offered by default, the other tools if a job or request names them.
PUBLISHED = ("deleteContext", "checkBudget")
CONTEXT_TOOLS = (*PUBLISHED, "deletePart", "summarizeContext", "undoEdit", "redoEdit", "proposeDeletes")


def _check_names(names: tuple[str, ...]) -> tuple[str, ...]:
    for name in names:
        if name not in CONTEXT_TOOLS:
            raise ValueError(f"unknown context tool {name[:80]!r}{did_you_mean(name[:80], CONTEXT_TOOLS)}")
        if names.count(name) > 1:
            raise ValueError(f"{name!r} is named more than once; each is offered once")
    return names


ContextTools = Annotated[tuple[str, ...], Field(max_length=16), AfterValidator(_check_names)]


class ConversationKeys(Body):
    """Settings of a conversation, with the names of sources 3 and 5 (docs/sources.md)."""

    statelm_enabled: bool = Field(
        default=False, description="let the model edit its context (docs/conversations.md)"
    )
    context_tools: ContextTools = Field(
        default=PUBLISHED, min_length=1, description="the tools for it (docs/conversations.md)"
    )
    max_user_turns: int | None = Field(
        default=None, ge=0, le=10_000, description="the user's answers per episode; absent: any number"
    )
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="sampled tokens per episode, all decisions together"
    )
    context_length_penalty: Penalty = Field(
        default=-1.0, description="reward of the last decision before a prompt that is too long"
    )


class MultiTurn(ConversationKeys):
    """The settings of a conversation in a request."""

    @model_validator(mode="after")
    def _check_context_tools(self) -> "MultiTurn":
        if self.context_tools != PUBLISHED and not self.statelm_enabled:
            named = list(self.context_tools)
            raise ValueError(
                f"context_tools is {named}, and statelm_enabled is false: none of them would be offered"
            )
        return self


class RolloutRequest(Body):
    """Asks for one episode. Siblings of a group have equal `start` and different sampling seeds."""

    rollout_id: Id
    run_id: Id
    iteration: int = Field(default=0, ge=0)
    group_id: str = Field(default="", max_length=200)
    sibling: int = Field(default=0, ge=0)
    attempt: int = Field(default=0, ge=0)
    start: Start
    env: EnvSpec
    policy: PolicySpec
    step_rewards: StepRewards = StepRewards()
    limits: RolloutLimits = RolloutLimits()
    state_keys: tuple[Name, ...] = Field(
        default=(), max_length=8, description="kinds of state key for each decision"
    )
    multi_turn: MultiTurn = MultiTurn()
    snapshot_turns: tuple[Turn, ...] = Field(
        default=(),
        max_length=64,
        description="decisions before which the step gets a snapshot of the environment, for branches; where "
        "a limit prevents the decision, the trajectory gets it as final_snapshot",
    )
    final_view: bool = Field(
        default=False,
        description="if a limit cuts the episode, also get the prompt of the next decision, by which a "
        "critic values the last state",
    )
    ground_truth: GroundTruth = Field(
        default=None,
        repr=False,
        description="any JSON by which the episode is scored; neither the policy nor a log ever shows it",
    )
    reward_function: Name | None = Field(
        default=None, description="of the operator; its score becomes the episode's outcome_reward"
    )
    interaction: InteractionSpec | None = Field(
        default=None, description="answers and scores every decision without a tool call"
    )

    @field_validator("snapshot_turns")
    @classmethod
    def _turns_that_can_be(cls, turns: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        twice = next((turn for turn in turns if turns.count(turn) > 1), None)
        if twice is not None:
            raise ValueError(f"turn {twice} is named more than once; each is kept once")
        # Invalid limits are missing in `info.data`, and get an error of their own.
        most = limits.max_decisions if (limits := info.data.get("limits")) else 10_000
        # The turn after the last decision is allowed: its snapshot becomes the trajectory's final_snapshot.
        if turns and max(turns) > most + 1:
            raise ValueError(
                f"turn {max(turns)} is above limits.max_decisions, {most}, and the one after: it is never "
                "reached"
            )
        return turns


# Published names, and the different keys that a rollout request uses for them; error messages name these.
PUBLISHED_PLACES = {
    "training": "step_rewards",
    "rollout": "step_rewards",
    **{key: f"step_rewards.{name}" for key, name in WIRE_NAMES.items()},
    "state_hashing_function": "state_keys",
    "seed": "start.seed",
    "resource_type": "env.env_name",
    "base_resource_config": "env.config",
    "env_config": "env.config",
    "policy_config": "policy.config",
    "inference_url": "policy.config",
    "max_model_length": "policy.config",
    "rollout_only": "policy",
    "task_definition": "env",
    "messages": "env.config",
    "raw_prompt": "env.config",
    "document_content": "env.config",
    "max_episode_steps": "limits.max_decisions",
    "max_turns": "limits.max_decisions",
    "max_assistant_turns": "limits.max_decisions",
    "interaction_name": "interaction.name",
    "interaction_kwargs": "interaction.kwargs",
    "interaction_config_path": "interaction.name",
    "query": "interaction.kwargs",
}


class RolloutBatch(Body):
    """Body of POST /rollouts."""

    rollouts: tuple[RolloutRequest, ...] = Field(min_length=1)


class RolloutsAccepted(Body):
    """Reply of POST /rollouts (202); `known` lists ids that were accepted before, with the same request."""

    accepted: tuple[str, ...]
    known: tuple[str, ...]
    instance_id: InstanceId


class RolloutFailure(Body):
    """Why a rollout has no trajectory: an infrastructure failure, never a mistake of the policy."""

    code: str
    detail: str
    decisions_done: Count = 0
    recurs: bool = Field(
        default=False,
        description="whether the same seeds would fail again: the cause is in the job or a plug-in",
    )


RolloutStatus = Literal["queued", "running", "finished", "failed", "cancelled"]


class Rollout(Body):
    """The state of a rollout; it has a `trajectory` if finished, and a `failure` if failed or cancelled."""

    rollout_id: str
    run_id: str
    iteration: int
    group_id: str
    sibling: int
    attempt: int
    instance_id: str
    status: RolloutStatus
    trajectory: Trajectory | None = None
    failure: RolloutFailure | None = None


class RolloutPage(Body):
    """Reply of GET /rollouts: unacknowledged rollouts that ended after the request's cursor, oldest first."""

    rollouts: tuple[Rollout, ...]
    cursor: str = Field(max_length=1_000)
    unfinished: Count = Field(description="rollouts of this run that are queued or running")
    instance_id: InstanceId


class RolloutAck(Body):
    """Body of POST /rollouts/ack: rollouts that the trainer has stored and the task app may forget."""

    run_id: Id
    rollout_ids: tuple[str, ...] = Field(min_length=1)


class RolloutAcked(Body):
    acked: tuple[str, ...]
    unknown: tuple[str, ...]
