"""The plug-in interfaces of the task app. An environment, a tool or a policy is one class in one file.

`Environment` knows its game, `AgentPolicy` decides, and `episode.worker.RLRolloutWorker` joins the two.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable
from uuid import uuid4

from shared_schemas.messages import Message, ToolSpec

PAST_DECISIONS_SHOWN = 3


RewardMode = Literal["pointwise", "batch"]


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment shows after a reset or a decision.

    Attributes:
        text: the observation as a person or a model reads it.
        data: the same facts as plain JSON-able values (for Crafter: the 9x7 view, vitals, ...), which
            scripted policies play from. Never more than what `text` is allowed to know.
        achievements_counts: counter of every achievement; empty for environments without achievements.
        reward_last_step: reward of the last env step; 0.0 after a reset.
    """

    text: str
    data: Mapping[str, Any]
    achievements_counts: Mapping[str, int] = field(default_factory=dict)
    reward_last_step: float = 0.0


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """What the tool calls of one decision did.

    Attributes:
        observation: after the last env step of the decision.
        env_rewards: [S] reward of each env step that ran.
        terminated: the environment's own end (death, answer given); never a limit.
        truncated: a limit inside the environment was reached.
        executed_actions: names of the env steps that ran, in order.
        invalid_reason: why the call was refused, in words the model can act on; None when it was valid.
            A refused call still ran one no-op env step (DESIGN.md 4.4).
        result: tool result text for the next prompt.
        results: of a ConversationalEnvironment: one text for each call, in their order; a refused call's
            begins with "error: ". Empty where `step` was given no calls.
    """

    observation: Observation
    env_rewards: tuple[float, ...]
    terminated: bool = False
    truncated: bool = False
    executed_actions: tuple[str, ...] = ()
    invalid_reason: str | None = None
    result: str = ""
    results: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call after its JSON was read: `arguments` is None when the text was no JSON object.

    `raw_arguments` is that text: a journal holds it alone, and reads the arguments from it again.
    """

    name: str
    arguments: Mapping[str, Any] | None
    raw_arguments: str = ""


@dataclass(frozen=True, slots=True)
class PastDecision:
    """A line of history for the next prompt: what was called and what it answered."""

    tool_calls: tuple[ToolRequest, ...]
    outcome: DecisionOutcome


class PolicyObservation(list[Message]):
    """What `RLRolloutWorker` hands to a policy: the messages of its prompt, and what stands behind them.

    A list of its own for each decision, never an alias of one that grows.

    Attributes:
        data: the observation as plain values, which scripted policies play from.
        max_tokens: the most that the policy may sample: what is left of a budget, at least 1; None: no limit.
    """

    __slots__ = ("data", "max_tokens")

    def __init__(
        self, messages: Iterable[Message], data: Mapping[str, Any], max_tokens: int | None = None
    ) -> None:
        super().__init__(messages)
        self.data = data
        self.max_tokens = max_tokens


class Tool(Protocol):
    """What a model may call. `task_app.tools.function_tool` makes one of a function with a typed signature.

    A tool that works on state is bound to that of its environment, one for each episode.
    """

    @property
    def spec(self) -> ToolSpec:
        """Name, description and the JSON Schema of the arguments."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """The result text; `task_app.tools.ToolRefused` says what is wrong with the arguments."""


class Environment(Protocol):
    """One episode of one task; never called from two threads at once.

    `reset` may take milliseconds. With a class attribute `quick_step = True` an environment promises steps of
    microseconds: sessions run them on the event loop, and those of other environments in a thread.
    """

    name: str
    outcome_definition: str

    def reset(self, seed: int) -> Observation:
        """Start the world of `seed` (0 <= seed < 2**31 - 1); may be called again."""

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        """Carry out the calls of one decision, in order.

        No calls, an unknown tool or bad arguments (or `invalid_reason`, found earlier) execute one no-op.
        Raises EpisodeOver after the end.
        """

    def tools(self) -> tuple[ToolSpec, ...]:
        """The tools a model may call, as JSON Schema."""

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        """The prompt of the next decision; pure, so that a policy route can use it without an episode."""

    def outcome_reward(self) -> float:
        """The episode's score so far, as `outcome_definition` defines it."""


def steps_quickly(environment: Environment) -> bool:
    """Whether it promises steps of microseconds, which may run on the event loop."""
    return bool(getattr(environment, "quick_step", False))


@runtime_checkable
class RestorableEnvironment(Environment, Protocol):
    """An Environment whose moments can be kept: for branches, siblings from one world, a journal.

    `restore`, and `snapshot` within an episode, may take milliseconds and run where `step` does; elsewhere
    `snapshot` copies on the event loop. State is plain data, never pickle: it may come back from outside.
    """

    def snapshot(self) -> bytes:
        """Everything that the future and `messages` depend on, but the config: that is kept beside it.

        Raises EpisodeOver before the first reset.
        """

    def restore(self, state: bytes) -> Observation:
        """Go on from there, in any process; the observation that was shown last when `snapshot` was taken.

        Raises ValueError when the bytes are no moment of an environment with this config; says which place.
        """


@runtime_checkable
class ConversationalEnvironment(Environment, Protocol):
    """An Environment whose conversation the episode loop keeps (task_app.episode.history), and may edit.

    A prompt is then the history, not `messages`, which stays for policy routes. Of several calls in a message
    each is carried out or refused by itself and has its text in `DecisionOutcome.results`; `invalid_reason`
    is that of the first one that was refused. A class attribute `takes_answers = False` says that only tools
    count: `answer` is never valid, so no interaction can be asked.
    """

    def opening(self) -> tuple[Message, ...]:
        """What stands before the first decision: a system message or none, then a user message.

        The same until the next reset. Raises EpisodeOver before the first one.
        """

    def answer(self, text: str) -> DecisionOutcome:
        """A decision without a call. Where only tools count, it is not valid and `invalid_reason` says so.

        `result` is what the user says next; it is not read where an interaction answers. Raises EpisodeOver
        after the end.
        """


def takes_answers(environment: Environment) -> bool:
    """Whether words without a call count in its conversation, so that somebody may answer them."""
    return bool(getattr(environment, "takes_answers", True))


@runtime_checkable
class RestorablePolicy(Protocol):
    """An AgentPolicy whose state beside its config can be kept: generator, memory, count of decisions."""

    def snapshot(self) -> dict[str, Any]:
        """The state as JSON-able data; never a key."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Decide on like the policy that `snapshot` was taken of; ValueError when it is no such state."""


# action, raw_policy_output, log_probs, value_estimate: see AgentPolicy.get_action.
PolicyAnswer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


class AgentPolicy(Protocol):
    """Decides. The method and its four-tuple are source 2's (Task 2.2), and all that a policy needs.

    A record calls a policy by its attribute `name`, and one that has none by the name of its class.
    """

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        """Choose the next action.

        Args:
            observation: a PolicyObservation: the list of messages that the prompt consists of.
            available_tools_specs: the tools on offer, as JSON Schema (OpenAI form).

        Returns:
            action: {"type": "tool_call", "name", "arguments": dict | str}, or several of them as
                {"type": "tool_call", "tool_calls": [{"id", "name", "arguments"}, ...]}, with the text beside
                the calls as "content" if there is one; {"type": "text", "content": str,
                "invalid_reason": str | None}; or {"type": "terminate"}.
            raw_policy_output: all that the model wrote, None for policies that are not models.
            log_probs: of exact tokens the fields of PolicyLogprobs, otherwise whatever the policy knows as
                JSON: either stands in the step. "sampling", "model", "prompt_tokens", "completion_tokens" and
                "finish_reason" are read too, and recorded in places of their own.
            value_estimate: V(s_t), None for policies without a critic.

        Raises:
            PolicyUnavailable: the model could not be asked (a failed rollout, not a decision).
            ContextLengthExceeded: the prompt does not fit (ends the episode with that reason).
        """


def policy_name(policy: AgentPolicy) -> str:
    """What records call a policy."""
    return str(getattr(policy, "name", type(policy).__name__))


@runtime_checkable
class RetryingPolicy(Protocol):
    """An AgentPolicy that asks a server again when it fails.

    `pending_failure` says what is wrong while it retries, and is None as soon as an answer is there: a
    deadline that falls into an outage is a failed rollout, not a slow policy.
    """

    pending_failure: str | None


@runtime_checkable
class RewardFunction(Protocol):
    """A user's judgement of whole episodes: what `task_app.reward_functions.reward_function` makes.

    The service never calls it: a child process does, which finds it by its name in the operator's file.
    """

    mode: RewardMode

    def __call__(self, **given: Any) -> Any:
        """Judge.

        Args:
            given: pointwise: `messages` (list[Message]: every decision's prompt, answer and tool results in
                order) and `ground_truth` of an episode; batch: `rollouts_messages` and `ground_truth`, both
                lists. Beside them facts of the episode, which may grow in number.

        Returns:
            An EvaluateResult or the dict of its fields, in batch mode a list with one for each episode, or an
            awaitable of that. `step_outputs` name decisions by `step_index`, t from 0.
        """


class BaseInteraction:
    """Answers the model as its user. A class of the operator's file; an object of it lives for one episode.

    What is not overridden does what the published base class does: `generate_response` is content with every
    answer and scores it 0.8.

    Its methods and their signatures are published, and classes written for them run unmodified. They run in
    a thread of their own, on an event loop of their own, so that one that blocks stalls nobody else; a class
    attribute `never_blocks = True` promises that they do not, and they run on the service's event loop.

    Source: 5-interactions.md; DESIGN.md 4.11.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode.

        Args:
            instance_id: unique to the episode.
            kwargs: the row's `interaction_kwargs` with its `name`, and `ground_truth` where there is one.

        Returns:
            The id that the other methods are called with.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last assistant message, and score it.

        Args:
            messages: the conversation in OpenAI's form, a copy; `content` is always text.
            kwargs: those of the start.

        Returns:
            should_terminate: whether the episode ends with this.
            response: the user's next message; not shown to the model at the end.
            score: reward of the decision that is answered, in reward units; None for none.
            metadata: anything, for the record.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """The score of now; a helper of `generate_response`, asked over HTTP alone."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release what the episode held; called once for every start that was begun, however it ended."""
