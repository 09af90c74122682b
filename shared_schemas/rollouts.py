"""The rollout service: what the trainer asks for, and what it gets back.

Ids are the trainer's, so a repeated request is harmless: the same id with the same body is the same
rollout, the same id with another body is a 409.
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

from shared_schemas.base import Body
from shared_schemas.context_tools import PUBLISHED, ContextTools, refuse_without_editing
from shared_schemas.patterns import Pattern
from shared_schemas.rewards import StepRewards
from shared_schemas.trajectory import Trajectory

Id = Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[A-Za-z0-9._:/-]+$")]
Name = Annotated[str, Field(max_length=200)]
# Strict: `false`, "7" and 7.0 are mistakes, and would start another world than the caller meant.
Seed = Annotated[int, Field(ge=0, lt=2**31 - 1, strict=True)]

Turn = Annotated[int, Field(ge=1, le=10_000, strict=True)]


def _fits_a_header(key: SecretStr) -> SecretStr:
    text = key.get_secret_value()
    if not (text.isascii() and text.isprintable()):
        raise ValueError("a key is made of printable ASCII characters")
    return key


InferenceKey = Annotated[SecretStr, Field(max_length=500), AfterValidator(_fits_a_header)]

MAX_GROUND_TRUTH_BYTES = 100_000


def _bounded(value: JsonValue) -> JsonValue:
    if (size := len(json.dumps(value, allow_nan=False))) > MAX_GROUND_TRUTH_BYTES:
        raise ValueError(f"as JSON it has {size} bytes; at most {MAX_GROUND_TRUTH_BYTES} are allowed")
    return value


GroundTruth = Annotated[JsonValue, AfterValidator(_bounded)]


# What start_interaction and generate_response are called with beside the row's own.
_TAKEN = frozenset({"self", "instance_id", "messages", "name"})


def _no_argument_of_ours(kwargs: dict[str, JsonValue]) -> dict[str, JsonValue]:
    if taken := sorted(_TAKEN & kwargs.keys()):
        raise ValueError(f"{taken[0]!r} is an argument that the interaction gets anyway; rename it")
    _bounded(kwargs)
    return kwargs


InteractionName = Annotated[str, Field(min_length=1, max_length=200)]
InteractionKwargs = Annotated[dict[str, JsonValue], AfterValidator(_no_argument_of_ours)]


class Start(Body):
    """Where an episode begins: in the world of a seed, or where a snapshot was taken, given by value.

    A snapshot is that of an environment session (POST /env/snapshot), of the same environment with the same
    config; its world, counters and history go along, while turns and limits count from this start. The parent
    is for the record. One class and no union, whose members' names would stand in the paths of errors.
    """

    seed: Seed | None = None
    snapshot: str | None = Field(default=None, min_length=1)
    parent_rollout_id: Id | None = None
    parent_turn: int | None = Field(default=None, ge=0)

    @model_validator(mode="after")
    def _one_of_two(self) -> "Start":
        if (self.seed is None) == (self.snapshot is None):
            raise ValueError("give either seed or snapshot")
        if self.snapshot is None and (self.parent_rollout_id, self.parent_turn) != (None, None):
            raise ValueError("a parent goes with a snapshot, not with a seed")
        return self


class EnvSpec(Body):
    env_name: Name
    config: dict[str, Any] = Field(default_factory=dict)


class PolicySpec(Body):
    """`inference_key` is sent to `inference_url` as a Bearer key; it is never stored or logged."""

    policy_name: Name
    config: dict[str, Any] = Field(default_factory=dict)
    inference_key: InferenceKey | None = None


class InteractionSpec(Body):
    """Who answers the model as its user, by its name in the operator's interaction file.

    `kwargs` are what the data row gives (`interaction_kwargs` without its name); they may hold the answer, so
    the policy never sees them and no log holds them.
    """

    name: InteractionName | None = Field(
        default=None, description="may be absent where the file has one interaction alone"
    )
    kwargs: InteractionKwargs = Field(default_factory=dict, repr=False)


Decisions = Annotated[int, Field(ge=1, le=10_000)]
Seconds = Annotated[float, Field(gt=0.0, le=86_400.0)]
TerminationTarget = Literal["raw", "text"]


class RolloutLimits(Body):
    """What ends an episode that its environment does not end."""

    max_decisions: Decisions = 50
    max_invalid_decisions: Decisions = 5
    timeout_s: Seconds = 600.0
    termination_regex: Pattern | None = Field(
        default=None,
        description="ends the episode after a decision whose last 4,096 bytes hold it; Rust's regex syntax",
    )
    termination_target: TerminationTarget = Field(
        default="raw", description="searched: all that the policy wrote, or the text beside its tool calls"
    )


class MultiTurn(Body):
    """How a conversation is kept, of an environment that has one; names of sources 3 and 5."""

    statelm_enabled: bool = Field(
        default=False,
        description="the model may edit its context: messages have ids",
    )
    context_tools: ContextTools = Field(
        default=PUBLISHED, description="what it edits its context with, where statelm_enabled"
    )
    max_user_turns: int | None = Field(
        default=None,
        ge=0,
        le=10_000,
        description="answers of the user, whoever it is; the next decision then ends it",
    )
    max_episode_tokens: int | None = Field(
        default=None, ge=1, description="tokens that the policy samples in an episode, all decisions together"
    )
    context_length_penalty: float = Field(
        default=-1.0,
        le=0.0,
        description="of the last decision, where the next prompt does not fit",
    )

    @model_validator(mode="after")
    def _tools_are_offered(self) -> "MultiTurn":
        refuse_without_editing(self.context_tools, statelm_enabled=self.statelm_enabled)
        return self


class RolloutRequest(Body):
    """One episode to run. Siblings of a group share `start`; each has its own sampling seed."""

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
        default=(), max_length=8, description="kinds of state key that each decision is to carry"
    )
    multi_turn: MultiTurn = MultiTurn()
    snapshot_turns: tuple[Turn, ...] = Field(
        default=(),
        max_length=64,
        description="turns before whose decision the environment is kept, on the step: for branches",
    )
    final_view: bool = Field(
        default=False,
        description="where a limit cuts the episode, also ask for the prompt of the decision that is not "
        "made: a critic values the state by it",
    )
    ground_truth: GroundTruth = Field(
        default=None,
        repr=False,
        description="any JSON: what the episode is scored by; the policy never sees it, no log holds it",
    )
    reward_function: Name | None = Field(
        default=None, description="of the operator: its score becomes the outcome_reward of the episode"
    )
    interaction: InteractionSpec | None = Field(
        default=None, description="answers every decision that calls no tool, and scores it"
    )

    @field_validator("snapshot_turns")
    @classmethod
    def _turns_that_can_be(cls, turns: tuple[int, ...], info: ValidationInfo) -> tuple[int, ...]:
        twice = next((turn for turn in turns if turns.count(turn) > 1), None)
        if twice is not None:
            raise ValueError(f"turn {twice} is named more than once; each is kept once")
        # Without limits, they were refused themselves.
        most = limits.max_decisions if (limits := info.data.get("limits")) else 10_000
        if turns and max(turns) > most:
            raise ValueError(f"turn {max(turns)} is above limits.max_decisions, {most}: it is never reached")
        return turns


class RolloutBatch(Body):
    """Body of POST /rollouts."""

    rollouts: tuple[RolloutRequest, ...] = Field(min_length=1)


class RolloutsAccepted(Body):
    """Answer of POST /rollouts (202). `known` were accepted earlier with the same body."""

    accepted: tuple[str, ...]
    known: tuple[str, ...]
    instance_id: str


class RolloutFailure(Body):
    """Why a rollout has no trajectory. Only infrastructure fails a rollout; what a policy does is data."""

    code: str
    detail: str
    decisions_done: int = 0


RolloutStatus = Literal["queued", "running", "finished", "failed", "cancelled"]


class Rollout(Body):
    """The state of one rollout; `trajectory` when finished, `failure` when failed or cancelled."""

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
    """Answer of GET /rollouts: everything that ended since `cursor`, oldest first, until acknowledged."""

    rollouts: tuple[Rollout, ...]
    cursor: str
    unfinished: int = Field(ge=0, description="rollouts of this run that are queued or running")
    instance_id: str


class RolloutAck(Body):
    """Body of POST /rollouts/ack: the trainer has stored these; the task app may forget them."""

    run_id: Id
    rollout_ids: tuple[str, ...] = Field(min_length=1)


class RolloutAcked(Body):
    acked: tuple[str, ...]
    unknown: tuple[str, ...]
