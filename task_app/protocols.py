"""The plug-in interfaces of the task app. An environment, a tool or a policy is one class in one file.

`Environment` knows its game, `AgentPolicy` decides, and `episode.worker.RLRolloutWorker` joins the two.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from types import MappingProxyType
from typing import Any, Literal, Protocol, runtime_checkable
from uuid import uuid4

from shared_schemas.base import shown
from shared_schemas.json_text import plain_json, plain_number
from shared_schemas.messages import Message, ToolSpec

PAST_DECISIONS_SHOWN = 3

RewardMode = Literal["pointwise", "batch"]


@dataclass(frozen=True, slots=True)
class Observation:
    """An environment's output after a reset or a decision; numpy's values become plain values."""

    text: str
    """The observation as a person or a model reads it."""
    data: Mapping[str, Any]
    """The same facts as plain JSON-able values (for Crafter: the 9x7 view, vitals, ...), for scripted
    policies. They contain no fact that `text` must hide."""
    achievements_counts: Mapping[str, int] = field(default_factory=dict)
    """Counter of every achievement; empty for environments without achievements."""
    reward_last_step: float = 0.0
    """Reward of the last env step; 0.0 after a reset."""

    def __post_init__(self) -> None:
        # Checked here, so that an error names the plug-in's own line and no route receives a wrong value.
        _check_text(self.text, "text")
        _set_field(self, "data", plain_json(self.data, "data"))
        counts = self.achievements_counts
        if any([type(count) is not int for count in counts.values()]):
            plain = {name: _read_count(name, count) for name, count in counts.items()}
            _set_field(self, "achievements_counts", plain)
        reward = self.reward_last_step
        if type(reward) is not float or not isfinite(reward):
            _set_field(self, "reward_last_step", plain_number(reward, "reward_last_step"))


@dataclass(frozen=True, slots=True)
class DecisionOutcome:
    """The effects of one decision's tool calls; numpy's scalars and arrays become plain values."""

    observation: Observation
    """After the last env step of the decision."""
    env_rewards: tuple[float, ...]
    """[S] reward of each env step that ran."""
    terminated: bool = False
    """The environment's own end (death, answer given); never a limit."""
    truncated: bool = False
    """A limit inside the environment was reached."""
    executed_actions: tuple[str, ...] = ()
    """Names of the env steps that ran, in order."""
    invalid_reason: str | None = None
    """Why the call was refused, in words for the model; None if it was valid. A refused call still runs one
    no-op env step (DESIGN.md 4.4)."""
    result: str = ""
    """Text for the next prompt."""
    results: tuple[str, ...] = ()
    """For a ConversationalEnvironment, one text for each call in order; for a refused call it begins with
    "error: ". Empty if `step` got no calls."""

    def __post_init__(self) -> None:
        if not isinstance(self.observation, Observation):
            raise TypeError(f"observation is {shown(self.observation)}; an Observation is needed")
        _check_text(self.result, "result")
        rewards: Any = self.env_rewards
        if type(rewards) is not tuple or any([type(reward) is not float for reward in rewards]):
            if not isinstance(rewards, Iterable):
                raise TypeError(f"env_rewards is {shown(rewards)}; a tuple with a number a step is needed")
            numbers = [plain_number(reward, f"env_rewards[{s}]") for s, reward in enumerate(rewards)]
            _set_field(self, "env_rewards", tuple(numbers))
        elif not all(map(isfinite, rewards)):
            raise ValueError(f"env_rewards is {shown(rewards)}; finite numbers are needed")
        for name in ("terminated", "truncated"):
            if type(flag := getattr(self, name)) is not bool:
                _set_field(self, name, _read_flag(name, flag))


def _check_text(value: object, name: str) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {shown(value)}; a text is needed")


def _set_field(instance: object, name: str, value: object) -> None:
    """Set a field of a frozen dataclass that is being made."""
    object.__setattr__(instance, name, value)


def _read_count(name: str, value: Any) -> int:
    count = plain_number(value, f"achievements_counts[{name!r}]")
    if count != int(count):
        raise TypeError(f"achievements_counts[{name!r}] is {count}; a whole number is needed")
    return int(count)


def _read_flag(name: str, value: Any) -> bool:
    """Return a flag, which may be numpy's. Text is refused, because "False" would count as true."""
    if isinstance(value, str | bytes) or value not in (0, 1):
        raise TypeError(f"{name} is {shown(value)}; a bool is needed")
    return bool(value)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call whose JSON is parsed: `arguments` is None if the text `raw_arguments` was no JSON object.

    The journal of sessions stores only the text, and parses it again.
    """

    name: str
    arguments: Mapping[str, Any] | None
    raw_arguments: str = ""


@dataclass(frozen=True, slots=True)
class PastDecision:
    """A past decision that the next prompt may show: its calls and its outcome."""

    tool_calls: tuple[ToolRequest, ...]
    outcome: DecisionOutcome


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class PolicyObservation(list[Message]):
    """The messages of the prompt as a list, with more facts as attributes; `RLRolloutWorker` makes it.

    Each decision gets a new list.

    Attributes:
        data: the observation as plain values, for scripted policies.
        max_tokens: most tokens to sample, for example the rest of a budget; at least 1. None: no limit.
        stop: strings that end the answer, as a captured agent may request.
        options: further settings of a captured agent's call, for a policy that is `FollowsOptions`.
    """

    __slots__ = ("data", "max_tokens", "options", "stop")

    def __init__(
        self,
        messages: Iterable[Message],
        data: Mapping[str, Any],
        max_tokens: int | None = None,
        stop: tuple[str, ...] = (),
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> None:
        super().__init__(messages)
        self.data = data
        self.max_tokens = max_tokens
        self.stop = stop
        self.options = options


class Tool(Protocol):
    """A tool that a model may call. `task_app.tools.function_tool` makes tools of functions.

    A tool that works on state belongs to a single environment.
    """

    @property
    def spec(self) -> ToolSpec:
        """Name, description and the JSON Schema of the arguments."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the result text; raise `task_app.tools.ToolRefused` for wrong arguments."""


class Environment(Protocol):
    """A task, played one episode at a time; it is never called from two threads at once.

    `reset` may take milliseconds. If the attribute `quick_step` is true, steps take microseconds and run on
    the event loop. All other environments step in a thread.
    """

    name: str
    outcome_definition: str

    def reset(self, seed: int) -> Observation:
        """Start the world of `seed` (0 <= seed < 2**31 - 1); may be called again."""

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        """Carry out the calls of one decision, in order.

        Without calls, or with an unknown tool, bad arguments or an `invalid_reason`, one no-op is executed.
        Raises EpisodeOver after the end.
        """

    def tools(self) -> tuple[ToolSpec, ...]:
        """Return the tools that a model may call, with JSON Schemas."""

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        """Return the next decision's prompt, from the arguments alone: policy routes have no episode."""

    def outcome_reward(self) -> float:
        """Return the episode's score so far, as `outcome_definition` defines it."""


def steps_quickly(environment: Environment) -> bool:
    """Return whether the environment promises steps of microseconds, which may run on the event loop."""
    return bool(getattr(environment, "quick_step", False))


@runtime_checkable
class RestorableEnvironment(Environment, Protocol):
    """An Environment with snapshots: for branches, for siblings in one world, and for the journal.

    `restore` and `snapshot` may take milliseconds. Within an episode both run where `step` runs; elsewhere
    `snapshot` runs on the event loop. The state may come from outside, so it is plain data, never pickle.
    """

    def snapshot(self) -> bytes:
        """Return the state on which later steps and `messages` depend; the config is stored separately.

        Raises EpisodeOver before the first reset.
        """

    def restore(self, state: bytes) -> Observation:
        """Continue from the state, in any process; return the observation that was shown last.

        Raises ValueError, with the place of the fault, if the bytes are no state for this config.
        """


@runtime_checkable
class ReseedableEnvironment(RestorableEnvironment, Protocol):
    """A RestorableEnvironment whose random generator can be given another seed during an episode.

    Without it, episodes that begin at one snapshot draw the same numbers.
    """

    def reseed(self, seed: int) -> None:
        """Draw all further random numbers from a generator with this seed; the observation stays the same.

        Raises EpisodeOver before the first reset.
        """


@runtime_checkable
class ClosableEnvironment(Environment, Protocol):
    """An Environment that holds something outside of this process: a connection, a process, a window.

    It holds nothing before its first reset.
    """

    def close(self) -> None:
        """Release everything; may take milliseconds.

        Called once, in a thread, when the episode or session has ended in any way. A step that hangs may
        still be running then. A later reset acquires everything again.
        """


@runtime_checkable
class AnsweredEnvironment(Environment, Protocol):
    """An Environment in which words without a call are a decision too, or the only kind of decision."""

    def answer(self, text: str) -> DecisionOutcome:
        """Carry out a decision without a call; if it is not allowed, `invalid_reason` says why.

        Raises EpisodeOver after the end.
        """


@runtime_checkable
class ConversationalEnvironment(AnsweredEnvironment, Protocol):
    """An Environment whose conversation the episode loop keeps (task_app.episode.history) and may edit.

    The prompt is then the history; only policy routes use `messages`. If a message has several calls, each
    is carried out or refused separately: `DecisionOutcome.results` has a text for each, and
    `invalid_reason` is that of the first refused call. A class attribute `takes_answers = False` says that
    only tools count: `answer` is never valid, and no interaction can answer.
    """

    def opening(self) -> tuple[Message, ...]:
        """Return the messages before the first decision: at most one system message, then a user message.

        These messages stay the same until the next reset. Raises EpisodeOver before the first reset.
        """

    def answer(self, text: str) -> DecisionOutcome:
        """Carry out a decision without a call; if only tools count, `invalid_reason` says so.

        `result` is the user's next message, unless an interaction answers.
        """


def takes_answers(environment: Environment) -> bool:
    """Return whether text without a call counts in the environment's conversation."""
    return bool(getattr(environment, "takes_answers", True))


@runtime_checkable
class RestorablePolicy(Protocol):
    """An AgentPolicy with snapshots of its state: generator, memory, count of decisions."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON-able data, never with a key."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue like the policy of the snapshot; raise ValueError if the state is no snapshot."""


@runtime_checkable
class FollowsOptions(Protocol):
    """An AgentPolicy that follows settings of a captured agent's call, named as in Chat Completions."""

    @property
    def call_options(self) -> frozenset[str]:
        """Return which of `tool_choice`, `response_format` and `parallel_tool_calls` the policy follows."""


@runtime_checkable
class CountsTokens(Protocol):
    """An AgentPolicy that tells how many tokens a prompt has, without taking a decision."""

    async def count_tokens(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> int:
        """Return the number of tokens of the prompt; raises EpisodeFailed as `get_action` does."""


# action, raw_policy_output, log_probs, value_estimate: see AgentPolicy.get_action.
PolicyAnswer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


class AgentPolicy(Protocol):
    """Chooses actions. Its only method is published: 2-rollout-worker-and-gigpo.md, Task 2.2.

    Records use a policy's attribute `name`, or else the name of its class.
    """

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        """Choose the next action.

        Args:
            observation: a PolicyObservation: the list of messages of the prompt.
            available_tools_specs: the tools on offer, as JSON Schema (OpenAI form).

        Returns:
            action: {"type": "tool_call", "name", "arguments": dict | str}, or several of them as
                {"type": "tool_call", "tool_calls": [{"id", "name", "arguments"}, ...]}, with any
                text next to the calls as "content"; {"type": "text", "content": str,
                "invalid_reason": str | None}; or {"type": "terminate"}.
            raw_policy_output: all that the model wrote; None for policies without a model.
            log_probs: the fields of PolicyLogprobs if the exact tokens are known, otherwise any JSON; either
                goes into the step. "sampling", "model", "prompt_tokens", "completion_tokens" and
                "finish_reason" are read too, and recorded separately.
            value_estimate: V(s_t); None for policies without a critic.

        Raises:
            PolicyUnavailable: the model could not be asked; the rollout fails.
            ContextLengthExceeded: the prompt does not fit; this ends the episode.
        """


def policy_name(policy: AgentPolicy) -> str:
    return str(getattr(policy, "name", type(policy).__name__))


@runtime_checkable
class RetryingPolicy(Protocol):
    """An AgentPolicy that repeats failed requests to a server.

    `pending_failure` describes the failure while a request is retried, and is None otherwise. If a deadline
    passes during retries, the rollout fails; the policy does not count as slow.
    """

    pending_failure: str | None


@runtime_checkable
class RewardFunction(Protocol):
    """Judges whole episodes; `task_app.reward_functions.reward_function` makes one of a user's function.

    Only a child process calls it, and finds it by name in the operator's file.
    """

    mode: RewardMode

    def __call__(self, **facts: Any) -> Any:
        """Judge episodes.

        Args:
            facts: pointwise: `messages` (list[Message]: every decision's prompt, answer and tool results in
                order) and `ground_truth` of one episode; batch: `rollouts_messages` and `ground_truth`, both
                lists. There are further facts of the episode, and later versions may add more.

        Returns:
            An EvaluateResult or a dict of its fields; in batch mode a list with one for each episode. The
            returned value may be awaitable. `step_outputs` name decisions by `step_index`, t from 0.
        """


class BaseInteraction:
    """Simulates the user who answers the model. An operator's file names the subclasses.

    Each episode has its own object. The methods and their signatures are published, and classes written for
    them run unmodified. As in the published base class, `generate_response` accepts every answer with a score
    of 0.8. Methods run on an event loop in a thread of their own, so they may block. A class attribute
    `never_blocks = True` promises that they do not; then they run on the service's event loop.

    Source: 5-interactions.md; DESIGN.md 4.11.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode.

        Args:
            instance_id: unique to the episode.
            kwargs: the row's `interaction_kwargs` with its `name`, and `ground_truth` if there is one.

        Returns:
            The id for the other methods.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last assistant message, and score it.

        Args:
            messages: a copy of the conversation in OpenAI's form; `content` is always text.
            kwargs: the same as at the start.

        Returns:
            should_terminate: whether the episode ends.
            response: the user's next message; not shown to the model if the episode ends.
            score: reward of the answered decision; None to give no reward.
            metadata: anything, for the record.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the current score; `generate_response` may use it, and clients can get it over HTTP."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release the episode's resources; called once for every start, however the episode ended."""
