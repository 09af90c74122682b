"""The record of one episode: a `Trajectory` with a `StepData` for every decision."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from itertools import pairwise
from typing import Annotated, Any, Literal, overload

from pydantic import ConfigDict, Discriminator, Field, JsonValue, Tag, model_validator

from shared_schemas.base import Body, Count, Whole
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.messages import Message, ToolCall, ToolSpec

# Larger than any vocabulary or context, and fits a 32-bit counter.
MOST_TOKENS = 2**31 - 1
TokenId = Annotated[int, Field(ge=0, le=MOST_TOKENS)]
# Rounding may lift the log-prob of a certain token slightly above 0.
Logprob = Annotated[float, Field(le=1e-3, allow_inf_nan=False)]
# Log-prob of a sampled token. The bound refuses -9999, which vLLM sends for -inf: a sampled token cannot have
# it.
DrawnLogprob = Annotated[Logprob, Field(ge=-1_000.0)]


class StopReason(StrEnum):
    """Why an episode ended, in the order in which the reasons are tested (DESIGN.md 4.5)."""

    CRITICAL_ERROR = "critical_error"
    ENVIRONMENT_DONE = "environment_done"
    INTERACTION_DONE = "interaction_done"
    TERMINATE_ACTION = "terminate_action"
    TERMINATION_REGEX = "termination_regex"
    INVALID_ACTION = "invalid_action"
    CONTEXT_LENGTH = "context_length"
    DEADLINE = "deadline"
    EPISODE_TOKENS = "episode_tokens"
    MAX_USER_TURNS = "max_user_turns"
    MAX_DECISIONS = "max_decisions"


# Endings that may cut an episode which the policy could have continued. Other endings are the policy's own
# fault (an invalid action, a full context, slowness), or leave no state to continue from (a silent user).
_CUTS = frozenset({StopReason.ENVIRONMENT_DONE, StopReason.EPISODE_TOKENS, StopReason.MAX_DECISIONS})


def is_cut_short(reason: StopReason, *, truncated: bool) -> bool:
    """Whether a limit outside of the task ended an episode that the policy could have continued."""
    return truncated and reason in _CUTS


class AgentState(StrEnum):
    """The state of the episode loop, as in the diagrams of sources 3 and 5.

    PENDING renders a new view (the first view, or a view after an edit), GENERATING calls the policy,
    PROCESSING_TOOLS executes the policy's tool calls, INTERACTING lets the user answer the policy's text. An
    episode ends as COMPLETED after a text that counts as an answer, otherwise as TERMINATED.
    """

    PENDING = "PENDING"
    GENERATING = "GENERATING"
    PROCESSING_TOOLS = "PROCESSING_TOOLS"
    INTERACTING = "INTERACTING"
    TERMINATED = "TERMINATED"
    COMPLETED = "COMPLETED"


# Further sampling options, with values that have no effect. If a request omitted them, vLLM would use the
# values of the model's generation_config.json, and sample from another distribution than the recorded one.
PLAIN_SAMPLING = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
_EVERY_TOKEN = -1  # top_k on the wire


class SamplingKeys(Body):
    """The sampling options that a person sets; an option at its default has no effect.

    The tables [rollout] and [[rollout_only]], policy configs, recorded decisions and requests to the engine
    have these fields. `trainer_backend.inference.sampler` applies the options to logits.
    """

    model_config = ConfigDict(allow_inf_nan=False)

    temperature: float = Field(
        default=1.0, ge=0.0, le=100.0, description="divides the logits; 0 takes the likeliest token"
    )
    top_p: float = Field(
        default=1.0,
        gt=0.0,
        le=1.0,
        description="nucleus: only the likeliest tokens that reach this probability together are sampled",
    )
    top_k: int = Field(
        default=0,
        ge=0,
        le=MOST_TOKENS,
        description="only so many of the likeliest tokens are sampled; 0 keeps the whole vocabulary",
    )
    min_p: float = Field(
        default=0.0,
        ge=0.0,
        le=1.0,
        description="only tokens with this share of the likeliest one's probability are sampled; 0 keeps all",
    )

    @property
    def changes(self) -> str:
        """The options that differ from their defaults, as text: `temperature = 0.5, top_k = 7`, or ""."""
        return self._list_changes(SamplingKeys.model_fields)

    @property
    def truncation(self) -> str:
        """Like `changes`, but without the temperature, so that only options that exclude tokens remain."""
        return self._list_changes(TRUNCATING)

    @property
    def is_truncated(self) -> bool:
        """Whether some tokens are excluded from sampling."""
        return bool(self.truncation)

    def _list_changes(self, names: Iterable[str]) -> str:
        options = {name: (getattr(self, name), SamplingKeys.model_fields[name].default) for name in names}
        return ", ".join(f"{name} = {value}" for name, (value, plain) in options.items() if value != plain)


# The options that remove tokens from the distribution; the temperature only reshapes it.
TRUNCATING = tuple(name for name in SamplingKeys.model_fields if name != "temperature")
TokenLimit = Annotated[int, Field(ge=1, le=MOST_TOKENS)]


class Sampling(SamplingKeys):
    """The options with which a decision's tokens were sampled; needed to recompute the tokens' log-probs.

    Every request for tokens takes its options from `request_keys` or `whole_request_keys`, so that the
    recorded options are those that were sent. Fields have the names of the request's keys.
    """

    seed: int | None = Field(default=None, ge=0, lt=2**64)
    max_tokens: TokenLimit = 64

    def request_keys(self) -> dict[str, Any]:
        """Return temperature, top_p and max_tokens, and other keys only if they differ from their defaults.

        All servers know the first three keys; some do not know the others.
        """
        openai = {"temperature": self.temperature, "top_p": self.top_p, "max_tokens": self.max_tokens}
        return openai | self.model_dump(exclude_defaults=True)

    def whole_request_keys(self) -> dict[str, Any]:
        """Return keys for every sampling option, so that no default of the server applies."""
        recorded = self.model_dump(exclude_none=True)
        return PLAIN_SAMPLING | recorded | {"top_k": self.top_k or _EVERY_TOKEN}


class ExpertChoices(Body):
    """The experts that processed the tokens of one model call, in a mixture-of-experts model.

    first: `data` describes the tokens of prompt + response from this index on.
    per_token: number of experts per token in `data`: (layers with experts) * (experts per layer), by layer.
    data: base64 of the numbers, little-endian, `number_bytes` bytes each; the largest number means unknown.
    """

    first: Count
    per_token: int = Field(ge=1)
    number_bytes: Literal[1, 2]
    data: str


class PolicyLogprobs(Body):
    """The exact tokens of one model call.

    The prompt is the first `prompt_ids_reused` ids of the rollout's previous prompt + response, followed by
    `prompt_token_ids`. logprobs[i] is the log-prob of token_ids[i] under softmax(logits / temperature) before
    truncation, or after truncation if the request has processed_logprobs (shared_schemas/chat.py). Each pair
    [i, policy_version] in `versions` says which weights sampled token_ids[i] and the tokens up to the next
    pair. `experts` is set for a mixture-of-experts model if the engine records them.
    """

    prompt_ids_reused: int = Field(default=0, ge=0)
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[tuple[int, int], ...]
    experts: ExpertChoices | None = None


def cover(starts: Sequence[int], count: int) -> bool:
    """Whether start indices of spans begin at 0, increase, and stay below `count`.

    Spans with such starts cover `count` tokens. For 0 tokens, [0] is valid.
    """
    if starts == [0]:
        return True  # the usual case: one version for all tokens
    return starts[:1] == [0] and all(a < b for a, b in pairwise([*starts, max(count, 1)]))


EXACT_FIELDS = {name for name, field in PolicyLogprobs.model_fields.items() if field.is_required()}


def _discriminate_logprobs(value: Any) -> str:
    exact = value.keys() >= EXACT_FIELDS if isinstance(value, dict) else isinstance(value, PolicyLogprobs)
    return "exact" if exact else "own"


# The JSON Schema of own log-probs excludes exact tokens, so that only one of the two schemas fits.
_OWN = Field(json_schema_extra={"not": {"required": [*sorted(EXACT_FIELDS)]}})
# A policy's log-probs: the exact tokens of a model call, or JSON of its own.
LogProbs = Annotated[
    Annotated[PolicyLogprobs, Tag("exact")] | Annotated[dict[str, JsonValue], _OWN, Tag("own")],
    Discriminator(_discriminate_logprobs),
]


class ObservationData(Body):
    """The prompt of a decision, and further facts of its state (DESIGN.md 4.2).

    It also acts as a sequence of the prompt's messages, as in source 2: `observation_data[-1].content`. In a
    conversation, only new messages are sent; the process that played the episode can rebuild all of them.
    """

    messages: tuple[Message, ...] = Field(
        default=(), description="of the prompt; for a conversation only those new since the previous prompt"
    )
    messages_reused: int = Field(
        default=0, ge=0, description="number of leading messages that the previous prompt has too"
    )
    changed: dict[int, Message] = Field(
        default_factory=dict, description="those of them that were edited since, by msg_id"
    )
    achievements_status: dict[str, bool] = Field(default_factory=dict)
    achievements_counts: dict[str, Whole] = Field(default_factory=dict)
    reward_last_step: float = Field(default=0.0, description="of the last env step before this observation")
    state_keys: dict[str, str] = Field(
        default_factory=dict, description="the key of the decision's state, by kind of key"
    )

    def recall(self, prompt: Callable[[], tuple[Message, ...]]) -> None:
        """Set the function that rebuilds the whole prompt, for this process only."""
        self.__dict__[_PROMPT] = prompt  # not a field, so that pydantic neither sends nor compares it

    @property
    def prompt(self) -> tuple[Message, ...]:
        """All messages that the policy saw.

        Raises ValueError if the step came over the wire and some of its messages are in earlier steps.
        """
        if not self.messages_reused:
            return self.messages
        if _PROMPT not in self.__dict__:
            raise ValueError(
                f"{self.messages_reused} messages of this prompt stand in earlier steps; prompts(steps) of "
                "shared_schemas.trajectory puts them together"
            )
        messages: tuple[Message, ...] = self.__dict__[_PROMPT]()
        return messages

    def __iter__(self) -> Iterator[Message]:  # type: ignore[override]  # pydantic's own gives fields
        return iter(self.prompt)

    def __len__(self) -> int:
        return len(self.prompt)

    def __bool__(self) -> bool:
        return True  # even without messages

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        yield from super().__repr_args__()
        # An estimator may use str() as a state key, which must contain all messages.
        if self.messages_reused and _PROMPT in self.__dict__:
            yield "prompt", self.prompt

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self.prompt[index]


class DecisionRewards(Body):
    """The achievements of one decision; `turn` counts from 1 (decision index t is turn - 1).

    `all` names achievements whose counter rose, `unique` those unlocked for the first time in the episode.
    """

    turn: Count = Field(ge=1)
    ach_delta: Count
    unique_delta: Count
    all: tuple[str, ...]
    unique: tuple[str, ...]

    @model_validator(mode="after")
    def _counts_match_names(self) -> "DecisionRewards":
        if self.ach_delta != len(self.all) or self.unique_delta != len(self.unique):
            raise ValueError("ach_delta and unique_delta must count the names in 'all' and 'unique'")
        return self


class RewardPart(Body):
    """A part of a decision's reward that does not come from the environment."""

    source: Literal["interaction", "tool", "penalty", "user"]
    value: float


class StepMetadata(Body):
    """Metadata of a step. `decision_rewards` is set only if the mode `decision_stepwise` is enabled."""

    decision_rewards: DecisionRewards | None = None


class UserAnswer(Body):
    """What an interaction returned in addition to its score; the task app limits the size."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="anything, for the record")
    unshown: str | None = Field(
        default=None, description="its response, if the episode ended and no prompt shows it"
    )


class StepInfo(Body):
    """Facts about a step that no reward or gradient depends on."""

    tool_result: str = ""
    invalid_reason: str | None = None
    executed_actions: tuple[str, ...] = ()
    policy_s: float = 0.0
    environment_s: float = 0.0
    interaction_s: float = Field(default=0.0, description="time of the interaction, not part of the others")
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    finish_reason: str | None = Field(
        default=None, description="how the model's answer ended, even if its tokens are unknown"
    )
    user_answer: UserAnswer | None = Field(
        default=None, description="of an interaction that returned more than its score"
    )


class StepData(Body):
    """One decision of an episode: a model call, its tool calls, and the S env steps that these triggered.

    Every field of source 2 is a parameter and an attribute here. Two of them are not fields of this model:
    `system_step_index`, which is `turn` - 1, and `resulting_messages_history`, which exists only if it was
    passed in or the episode was played in this process. If the history were a field, every step would send
    the whole conversation (DESIGN.md 4.2, 4.16).

    Source: 2-rollout-worker-and-gigpo.md, Task 2.1 (names); DESIGN.md sections 3 and 4.
    """

    turn: Count = Field(ge=1, description="decision index t plus 1")
    observation_data: ObservationData
    next_observation: ObservationData | None = Field(
        default=None, description="without messages: the counters and the last reward after this decision"
    )
    action_taken: dict[str, Any] = Field(description='{"type": "text" | "tool_call" | "terminate", ...}')
    tool_calls: tuple[ToolCall, ...] = ()
    snapshot: str | None = Field(
        default=None,
        description="of the environment before this decision, for `start.snapshot`; if requested",
    )
    raw_policy_output: str | None = None
    policy_name: str = ""
    sampling: Sampling | None = None
    policy_logprobs: LogProbs | None = Field(
        default=None, description="the exact tokens, or the policy's own log-prob data"
    )
    policy_value_estimate: float | None = None
    base_reward: float | None = Field(
        default=None, description="from a user's reward function; None if it gives none for this step"
    )
    advantage: float | None = Field(default=None, description="set by credit assignment, not on the wire")
    return_to_go: float | None = Field(
        default=None, description="G_t, or advantage plus value with a critic; set with advantage"
    )
    env_rewards: tuple[float, ...] | None = Field(default=None, description="[S] reward of each env step")
    reward_parts: tuple[RewardPart, ...] = ()
    metadata: StepMetadata = StepMetadata()
    is_done: bool = False
    terminated: bool = False
    truncated: bool = False
    stop_reason: StopReason | None = None
    step_info: StepInfo = StepInfo()

    def __init__(
        self,
        *,
        system_step_index: int | None = None,
        resulting_messages_history: Sequence[Any] | None = None,
        **fields: Any,
    ) -> None:
        """Make a step in this process.

        `system_step_index` counts from 0 and may replace `turn`. `resulting_messages_history` is for a step
        that was not played in this process. `observation_data` and `step_info` may be objects of any type,
        for estimators in this process; a step with such objects cannot be sent.
        """
        if system_step_index is not None:
            turn = fields.setdefault("turn", system_step_index + 1)
            if turn != system_step_index + 1:
                raise ValueError(
                    f"turn is {turn} and system_step_index {system_step_index}; give one of them"
                )
        other_values = {
            name: fields.pop(name)
            for name, body in _BODIES.items()
            if not isinstance(fields.get(name), body | None)
        }
        if "observation_data" in other_values:
            fields["observation_data"] = ObservationData()
        super().__init__(**fields)
        self.__dict__.update(other_values)
        if resulting_messages_history is not None:
            self.recall(list(resulting_messages_history).copy)

    # Lets pydantic validate data from the wire without calling this constructor.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def recall(self, history: Callable[[], Sequence[Message]]) -> None:
        """Set the function that returns the conversation after this step, for this process only."""
        self.__dict__[_HISTORY] = history

    def follow(self, before: "StepData | None") -> None:
        """Set the previous step (None: this is the first) in an episode that is no conversation."""
        self.__dict__[_BEFORE] = before

    @property
    def resulting_messages_history(self) -> list[Message]:
        """The conversation after this step, including the messages that the step caused.

        Raises ValueError if the step was made without it, or came over the wire.
        """
        if _HISTORY in self.__dict__:
            return list(self.__dict__[_HISTORY]())
        if _BEFORE not in self.__dict__:
            raise ValueError(
                f"step {self.turn} was made without resulting_messages_history, or came over the wire, which "
                "carries each message once; transcript(steps) of shared_schemas.trajectory has them"
            )
        steps = [self]
        while (before := steps[-1].__dict__[_BEFORE]) is not None:
            steps.append(before)
        return transcript(reversed(steps))

    @property
    def system_step_index(self) -> int:
        """The decision index t, from 0 (source 2's name)."""
        return self.turn - 1

    @property
    def states(self) -> tuple[AgentState, ...]:
        """The states of the episode loop in this decision, in order, as `AgentState` describes them."""
        observation, info = self.observation_data, self.step_info
        is_body = isinstance(observation, ObservationData)  # another type counts as a new view
        is_continued = is_body and observation.messages_reused and not observation.changed
        states = [] if is_continued else [AgentState.PENDING]
        states.append(AgentState.GENERATING)
        is_refused = isinstance(info, StepInfo) and info.invalid_reason is not None
        is_answer = self.action_taken.get("type") == "text" and not is_refused
        if self.tool_calls:
            states.append(AgentState.PROCESSING_TOOLS)
        elif is_answer:
            states.append(AgentState.INTERACTING)
        if self.is_done:
            is_complete = states[-1] is AgentState.INTERACTING
            states.append(AgentState.COMPLETED if is_complete else AgentState.TERMINATED)
        return tuple(states)

    @property
    def assistant_turn_index(self) -> int:
        """The index, from 0, of this step's answer among the policy's answers: `step_index` of `StepOutput`.

        Assistant messages of the first prompt are examples and do not count.
        """
        return self.turn - 1


# Published fields that may have values of other types in this process.
_BODIES: dict[str, type[Body]] = {"observation_data": ObservationData, "step_info": StepInfo}
# Names of values that are kept in this process and are not fields.
_PROMPT, _HISTORY, _BEFORE = "_prompt", "_history", "_before"


def transcript(steps: Iterable[StepData]) -> list[Message]:
    """Return prompt, answer and tool results of all decisions as one list, with the system message only once.

    For conversations, `Trajectory.full_history` also has ids and the messages after the last answer.
    """
    messages: list[Message] = []
    for step in steps:
        prompt, reused = step.observation_data.messages, step.observation_data.messages_reused
        if reused:  # a conversation's prompt repeats the previous answer and the messages after it
            del messages[reused:]
        messages.extend(message for message in prompt if not messages or message.role != "system")
        messages.append(read_answer(step))
        messages.extend(
            Message(role="tool", content=step.step_info.tool_result, tool_call_id=call.id)
            for call in step.tool_calls
        )
    return messages


def read_answer(step: StepData) -> Message:
    """Return the step's answer as a message."""
    # `content` comes first, because the raw output also contains the calls, which tool_calls has already.
    text = step.action_taken.get("content", step.raw_policy_output) or ""
    return Message(role="assistant", content=text, tool_calls=step.tool_calls or None)


def exact_tokens(step: StepData) -> PolicyLogprobs | None:
    """Return the exact tokens of the step's model call, which training needs; None if they are unknown."""
    tokens = step.policy_logprobs
    return tokens if isinstance(tokens, PolicyLogprobs) else None


class UserReward(Body):
    """The result of a user's reward function, and the environment's outcome that `result.score` replaces."""

    reward_function: str
    result: EvaluateResult
    environment_outcome_reward: float
    environment_outcome_definition: str


def prompts(steps: Iterable[StepData]) -> Iterator[tuple[Message, ...]]:
    """Yield the whole prompt of each decision; a step itself contains only what is new in its prompt.

    prompt_t = prompt_{t-1}[:messages_reused], with the messages in `changed` replaced, + messages
    """
    prompt: list[Message] = []
    for step in steps:
        observation = step.observation_data
        prompt = prompt[: observation.messages_reused]
        for msg_id, message in observation.changed.items():
            prompt[msg_id] = message
        prompt.extend(observation.messages)
        yield tuple(prompt)


class Trajectory(Body):
    """A finished episode; `outcome_definition` says what `outcome_reward` measures."""

    env_name: str
    policy_name: str
    model: str = ""
    seed: int = Field(description="of the world, even if the episode began at a snapshot")
    parent_rollout_id: str | None = Field(default=None, description="the rollout of that snapshot")
    parent_turn: int | None = Field(default=None, description="the decision before that snapshot")
    tools: tuple[ToolSpec, ...] = Field(default=(), description="the tools that the policy could call")
    steps: tuple[StepData, ...]
    outcome_reward: float
    outcome_definition: str
    outcome_before: float = Field(
        default=0.0,
        description="what outcome_reward was at the snapshot where the episode began; 0 in a world of a seed",
    )
    achievements_counts: dict[str, Whole] = Field(default_factory=dict)
    env_steps: Count
    terminated: bool
    truncated: bool
    stop_reason: StopReason
    wall_s: float = Field(ge=0.0)
    full_history: tuple[Message, ...] = Field(
        default=(), description="for a conversation, every message as it was said, deleted or not"
    )
    deleted_msg_ids: tuple[int, ...] = ()
    had_delete_operation: bool = False
    user_reward: UserReward | None = Field(default=None, description="if a reward function was requested")
    warnings: tuple[str, ...] = Field(
        default=(), description="things to check in an episode that counts; one sentence each"
    )
    final_view: PolicyLogprobs | None = Field(
        default=None,
        description="the prompt of the decision that a limit prevented, with one token that is not carried "
        "out; if it was requested and the server returns tokens",
    )
    final_snapshot: str | None = Field(
        default=None,
        description="of the environment before the decision that a limit prevented, if snapshot_turns names "
        "that decision",
    )

    @property
    def is_continued(self) -> bool:
        """Whether the episode began at a snapshot of another episode."""
        return self.parent_rollout_id is not None

    @property
    def cut_short(self) -> bool:
        """Whether a limit ended an episode that the policy could have continued (`is_cut_short`)."""
        return is_cut_short(self.stop_reason, truncated=self.truncated)

    @property
    def states(self) -> tuple[AgentState, ...]:
        """The states of the episode loop, decision by decision (sources 3 and 5)."""
        return tuple(state for step in self.steps for state in step.states)
