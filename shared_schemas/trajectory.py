"""One episode as data: a `StepData` for every decision, and the `Trajectory` that holds them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Any, overload

from pydantic import Discriminator, Field, JsonValue, Tag

from shared_schemas.base import Body
from shared_schemas.evaluate_result import EvaluateResult
from shared_schemas.messages import Message, ToolCall, ToolSpec
from shared_schemas.rewards import DecisionRewards, RewardPart

# More than any vocabulary or model holds, and few enough for every counter behind it.
MOST_TOKENS = 2**31 - 1


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


# Endings after which the policy could have gone on, where they cut the episode: its own (an invalid action, a
# context that is full, slowness) are to be felt, and a user who fell silent leaves no state to go on from.
_CUTS = frozenset({StopReason.ENVIRONMENT_DONE, StopReason.EPISODE_TOKENS, StopReason.MAX_DECISIONS})


def is_cut_short(reason: StopReason, *, truncated: bool) -> bool:
    """Whether a limit outside of the task ended an episode whose policy could have gone on."""
    return truncated and reason in _CUTS


class AgentState(StrEnum):
    """What the loop of an episode is at: the states of the diagrams of sources 3 and 5.

    PENDING renders a view anew (the first one, one after an edit), GENERATING asks the policy,
    PROCESSING_TOOLS carries out its calls, INTERACTING lets the user answer its words. An episode ends as
    COMPLETED after words that count as an answer, as TERMINATED otherwise.
    """

    PENDING = "PENDING"
    GENERATING = "GENERATING"
    PROCESSING_TOOLS = "PROCESSING_TOOLS"
    INTERACTING = "INTERACTING"
    TERMINATED = "TERMINATED"
    COMPLETED = "COMPLETED"


class Sampling(Body):
    """How the tokens of a decision were drawn: needed to recompute the log-probs that they had."""

    temperature: float = Field(default=1.0, ge=0.0, allow_inf_nan=False)
    top_p: float = Field(default=1.0, gt=0.0, le=1.0)
    top_k: int = Field(default=0, ge=0, le=MOST_TOKENS, description="0 keeps the whole vocabulary")
    seed: int | None = Field(default=None, ge=0, lt=2**64)
    max_tokens: int = Field(default=64, ge=1, le=MOST_TOKENS)

    @property
    def is_truncated(self) -> bool:
        """Some of the probability mass could never be sampled."""
        return self.top_p < 1.0 or self.top_k > 0


class PolicyLogprobs(Body):
    """The exact tokens of one model call, as the inference server saw and sampled them.

    prompt: the first `prompt_ids_reused` ids of the previous prompt + response of this rollout,
    then `prompt_token_ids`. logprobs[i] is that of token_ids[i] under softmax(logits / temperature),
    before any truncation by top_p or top_k, or where the request asked for processed_logprobs
    (shared_schemas/chat.py), after it. versions: [[first_token, policy_version], ...].
    """

    prompt_ids_reused: int = Field(default=0, ge=0)
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: str
    versions: tuple[tuple[int, int], ...]


_EXACT = {name for name, field in PolicyLogprobs.model_fields.items() if field.is_required()}


def _kind_of_logprobs(value: Any) -> str:
    """Exact tokens have all of their fields; anything less is what a policy tells by itself."""
    exact = value.keys() >= _EXACT if isinstance(value, dict) else isinstance(value, PolicyLogprobs)
    return "exact" if exact else "own"


# What a policy tells of its log-probs: the exact tokens of a model call, or JSON of its own.
LogProbs = Annotated[
    Annotated[PolicyLogprobs, Tag("exact")] | Annotated[dict[str, JsonValue], Tag("own")],
    Discriminator(_kind_of_logprobs),
]


class ObservationData(Body):
    """What the policy saw: its messages; and what every step carries in every mode (DESIGN.md 4.2).

    As a sequence it is the whole prompt, as source 2 has it: `observation_data[-1].content`. Of a
    conversation the wire carries only what is new; the process that played it knows the whole.
    """

    messages: tuple[Message, ...] = Field(
        default=(),
        description="of the prompt; of a conversation only those new since the prompt before",
    )
    messages_reused: int = Field(
        default=0, ge=0, description="messages that stand before them, as the prompt before showed them"
    )
    changed: dict[int, Message] = Field(
        default_factory=dict, description="but for these, which were edited since; by msg_id"
    )
    achievements_status: dict[str, bool] = Field(default_factory=dict)
    achievements_counts: dict[str, int] = Field(default_factory=dict)
    reward_last_step: float = Field(default=0.0, description="of the last env step before this observation")
    state_keys: dict[str, str] = Field(
        default_factory=dict, description="name of the state that the decision was made in, by kind of key"
    )

    def recall(self, prompt: Callable[[], tuple[Message, ...]]) -> None:
        """Let it know, in this process alone, how the whole prompt is had again."""
        self.__dict__[_PROMPT] = prompt  # pydantic neither sends nor compares what is no field

    @property
    def prompt(self) -> tuple[Message, ...]:
        """All messages that the policy saw.

        Raises:
            ValueError: it came over the wire, and earlier steps have a part of them.
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
        return True  # also without messages

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        yield from super().__repr_args__()
        if self.messages_reused and _PROMPT in self.__dict__:  # who keys states by str() means all of it
            yield "prompt", self.prompt

    @overload
    def __getitem__(self, index: int) -> Message: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Message, ...]: ...
    def __getitem__(self, index: int | slice) -> Message | tuple[Message, ...]:
        return self.prompt[index]


class StepMetadata(Body):
    """`decision_rewards` is present only when enabled and `decision_stepwise`."""

    decision_rewards: DecisionRewards | None = None


class UserAnswer(Body):
    """What an interaction told beside its score, within the bound of the task app on one answer of it."""

    metadata: dict[str, Any] = Field(default_factory=dict, description="anything, for the record")
    unshown: str | None = Field(
        default=None, description="its response, where the episode ended and no prompt shows it"
    )


class StepInfo(Body):
    """Facts about a step that no reward or gradient depends on."""

    tool_result: str = ""
    invalid_reason: str | None = None
    executed_actions: tuple[str, ...] = ()
    policy_s: float = 0.0
    environment_s: float = 0.0
    interaction_s: float = Field(default=0.0, description="of who answered as the user; in no other time")
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    finish_reason: str | None = Field(
        default=None, description="how the model's answer ended, also where its tokens are not known"
    )
    user_answer: UserAnswer | None = Field(
        default=None, description="of an interaction that was asked and told more than its score"
    )


class StepData(Body):
    """One decision of an episode: a model call, its tool calls and the S env steps they triggered.

    `StepData(...)` takes the fields that source 2 publishes, and has them as attributes. Of these
    `system_step_index` is `turn` - 1, and `resulting_messages_history` is known in the process that played
    the episode, or was given it: it is no field, for the conversation would travel once a step, and the wire
    grow with its square (DESIGN.md 4.2, 4.16).

    Source: 2-rollout-worker-and-gigpo.md, Task 2.1 (names); DESIGN.md sections 3 and 4.
    """

    turn: int = Field(ge=1, description="decision index t plus 1")
    observation_data: ObservationData
    next_observation: ObservationData | None = Field(
        default=None, description="without messages: the counters and the last reward after this decision"
    )
    action_taken: dict[str, Any] = Field(description='{"type": "text" | "tool_call" | "terminate", ...}')
    tool_calls: tuple[ToolCall, ...] = ()
    snapshot: str | None = Field(
        default=None,
        description="of the environment before this decision, for `start.snapshot`; where it was asked for",
    )
    raw_policy_output: str | None = None
    policy_name: str = ""
    sampling: Sampling | None = None
    policy_logprobs: LogProbs | None = Field(
        default=None, description="the exact tokens; of a policy that does not know them, what it tells"
    )
    policy_value_estimate: float | None = None
    base_reward: float | None = Field(
        default=None, description="of a user's reward function for this step; None: it gave none"
    )
    advantage: float | None = Field(default=None, description="set where credit is given, not on the wire")
    return_to_go: float | None = Field(
        default=None, description="G_t, or advantage plus value where there is a critic; set with advantage"
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
        """Of a step that did not come over the wire.

        Args:
            system_step_index: instead of `turn`, from 0.
            resulting_messages_history: of a step that was not played here.
            fields: those of the class. Where the wire has a body (observation_data, step_info,
                policy_logprobs), anything else is kept as it is given, for estimators in this process; such a
                step cannot be sent.
        """
        if system_step_index is not None:
            turn = fields.setdefault("turn", system_step_index + 1)
            if turn != system_step_index + 1:
                raise ValueError(
                    f"turn is {turn} and system_step_index {system_step_index}; give one of them"
                )
        given = {
            name: fields.pop(name)
            for name, body in _BODIES.items()
            if not isinstance(fields.get(name), body | None)
        }
        if "observation_data" in given:
            fields["observation_data"] = ObservationData()
        super().__init__(**fields)
        self.__dict__.update(given)
        if resulting_messages_history is not None:
            self.recall(list(resulting_messages_history).copy)

    # What comes over the wire is validated past it: in one go, and without the names that are not sent.
    __init__.__pydantic_base_init__ = True  # type: ignore[attr-defined]

    def recall(self, history: Callable[[], Sequence[Message]]) -> None:
        """Let it know, in this process alone, how the conversation after it is had again."""
        self.__dict__[_HISTORY] = history

    def follow(self, before: "StepData | None") -> None:
        """Let it know the step before it instead, where prompts are fresh: None of the first."""
        self.__dict__[_BEFORE] = before

    @property
    def resulting_messages_history(self) -> list[Message]:
        """The conversation after this step, the messages that came of it last.

        Raises:
            ValueError: the step does not know it.
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
        """t, from 0 (the name that source 2 publishes)."""
        return self.turn - 1

    @property
    def states(self) -> tuple[AgentState, ...]:
        """What the loop went through for this decision, in order; what was seen as a list is a fresh view."""
        seen, info = self.observation_data, self.step_info
        reused = isinstance(seen, ObservationData) and seen.messages_reused and not seen.changed
        found = [] if reused else [AgentState.PENDING]
        found.append(AgentState.GENERATING)
        refused = isinstance(info, StepInfo) and info.invalid_reason is not None
        answered = self.action_taken.get("type") == "text" and not refused
        if self.tool_calls:
            found.append(AgentState.PROCESSING_TOOLS)
        elif answered:
            found.append(AgentState.INTERACTING)
        if self.is_done:
            over = AgentState.COMPLETED if found[-1] is AgentState.INTERACTING else AgentState.TERMINATED
            found.append(over)
        return tuple(found)

    @property
    def assistant_turn_index(self) -> int:
        """Which of the conversation's answers is this step's, from 0: what a `StepOutput` names.

        Counted from the end of the opening: assistant messages of a few-shot opening are nobody's answers.
        """
        return self.turn - 1


# Published fields that the wire has a body for, which more than that may be given for.
_BODIES: dict[str, type[Body]] = {
    "observation_data": ObservationData,
    "step_info": StepInfo,
}
# What is remembered in this process beside the fields.
_PROMPT, _HISTORY, _BEFORE = "_prompt", "_history", "_before"


def transcript(steps: Iterable[StepData]) -> list[Message]:
    """Prompt, answer and tool results of every decision in order; the system message stands once.

    A whole conversation is its own transcript, with what no step holds: what came after the last answer, and
    ids (`Trajectory.full_history`).
    """
    messages: list[Message] = []
    for step in steps:
        prompt, reused = step.observation_data.messages, step.observation_data.messages_reused
        if reused:  # a conversation, whose prompt brings the answer before and all that followed it
            del messages[reused:]
        messages.extend(message for message in prompt if not messages or message.role != "system")
        messages.append(_answer(step))
        messages.extend(
            Message(role="tool", content=step.step_info.tool_result, tool_call_id=call.id)
            for call in step.tool_calls
        )
    return messages


def _answer(step: StepData) -> Message:
    # The raw output of a call holds the call itself, which stands in tool_calls already.
    written = step.action_taken.get("content", step.raw_policy_output) or ""
    return Message(role="assistant", content=written, tool_calls=step.tool_calls or None)


def exact_tokens(step: StepData) -> PolicyLogprobs | None:
    """The tokens of its model call, which training needs; None of a policy that does not know them."""
    tokens = step.policy_logprobs
    return tokens if isinstance(tokens, PolicyLogprobs) else None


class UserReward(Body):
    """What a user's reward function said of an episode, and the environment's own outcome, which its score
    stands in for."""

    reward_function: str
    result: EvaluateResult
    environment_outcome_reward: float
    environment_outcome_definition: str


def prompts(steps: Iterable[StepData]) -> Iterator[tuple[Message, ...]]:
    """The whole prompt of each decision, in order, from the parts that the steps carry.

    prompt_t = prompt_{t-1}[:messages_reused], with `changed` in their places, then messages
    """
    shown: list[Message] = []
    for step in steps:
        seen = step.observation_data
        shown = shown[: seen.messages_reused]
        for msg_id, message in seen.changed.items():
            shown[msg_id] = message
        shown.extend(seen.messages)
        yield tuple(shown)


class Trajectory(Body):
    """A finished episode. `outcome_definition` says in words what `outcome_reward` measures."""

    env_name: str
    policy_name: str
    model: str = ""
    seed: int = Field(description="of the world, also where the episode began at a snapshot")
    parent_rollout_id: str | None = Field(default=None, description="whose snapshot the episode began at")
    parent_turn: int | None = Field(default=None, description="and after which of its decisions")
    tools: tuple[ToolSpec, ...] = Field(
        default=(), description="what the policy could call, as it was offered"
    )
    steps: tuple[StepData, ...]
    outcome_reward: float
    outcome_definition: str
    achievements_counts: dict[str, int] = Field(default_factory=dict)
    env_steps: int = Field(ge=0)
    terminated: bool
    truncated: bool
    stop_reason: StopReason
    wall_s: float = Field(ge=0.0)
    full_history: tuple[Message, ...] = Field(
        default=(),
        description="of a conversation: every message as it was said, deleted or not",
    )
    deleted_msg_ids: tuple[int, ...] = ()
    had_delete_operation: bool = False
    user_reward: UserReward | None = Field(default=None, description="where a reward function was asked for")
    warnings: tuple[str, ...] = Field(
        default=(), description="what somebody should look at, though the episode counts; a sentence each"
    )
    final_view: PolicyLogprobs | None = Field(
        default=None,
        description="the prompt of the decision that a limit kept from being made, with one token that "
        "nobody carried out: where the request asked for it, and the server tells tokens",
    )

    @property
    def cut_short(self) -> bool:
        """Whether a limit outside of the task ended it while its policy could have gone on."""
        return is_cut_short(self.stop_reason, truncated=self.truncated)

    @property
    def states(self) -> tuple[AgentState, ...]:
        """What the loop of the episode went through, decision by decision (sources 3 and 5)."""
        return tuple(state for step in self.steps for state in step.states)
