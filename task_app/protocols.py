"""The interfaces that plug-ins of the task app implement: environments, tools, policies and others.

An `AgentPolicy` chooses actions, an `Environment` carries them out, and `episode.worker.RLRolloutWorker`
plays episodes with both.
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
    """What an environment shows after a reset or a decision. Numpy values are converted to plain values."""

    text: str
    """The observation as a person or a model reads it."""
    data: Mapping[str, Any]
    """The same facts as JSON-able values, for scripted policies; for Crafter, the 9x7 view, vitals and so on.
    A fact that `text` hides from the model must not be here either."""
    achievements_counts: Mapping[str, int] = field(default_factory=dict)
    """How often each achievement was reached in the episode; empty for environments without achievements."""
    reward_last_step: float = 0.0
    """Reward of the last env step; 0.0 after a reset."""

    def __post_init__(self) -> None:
        # The values are checked here, because the traceback of an error then contains the plug-in's own line.
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
    """What one decision caused in the environment. Numpy values are converted to plain values."""

    observation: Observation
    """Observation after the last env step of the decision."""
    env_rewards: tuple[float, ...]
    """[S] reward of each env step that was executed; S is the number of env steps of this decision."""
    terminated: bool = False
    """Whether the task itself ended, for example by death or a final answer; False if a limit ended it."""
    truncated: bool = False
    """Whether a limit of the environment itself, such as a number of steps, ended the episode."""
    executed_actions: tuple[str, ...] = ()
    """[S] names of the env steps that were executed, in order."""
    invalid_reason: str | None = None
    """Why a call was refused, in words for the model; None if the decision was valid. If the decision is
    refused, one no-op env step is executed instead (DESIGN.md 4.4)."""
    result: str = ""
    """Text that the next prompt shows as the result of the decision."""
    results: tuple[str, ...] = ()
    """Only for a ConversationalEnvironment: one text for each call, in order. The text of a refused call
    begins with "error: ". Empty if `step` got no calls."""

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
    """Set a field of a frozen dataclass; to be used only in its `__post_init__`."""
    object.__setattr__(instance, name, value)


def _read_count(name: str, value: Any) -> int:
    count = plain_number(value, f"achievements_counts[{name!r}]")
    if count != int(count):
        raise TypeError(f"achievements_counts[{name!r}] is {count}; a whole number is needed")
    return int(count)


def _read_flag(name: str, value: Any) -> bool:
    """Convert True, False, 1, 0 or an equal numpy value. Text is refused, because bool("False") is True."""
    if isinstance(value, str | bytes) or value not in (0, 1):
        raise TypeError(f"{name} is {shown(value)}; a bool is needed")
    return bool(value)


@dataclass(frozen=True, slots=True)
class ToolRequest:
    """A tool call of a model, with its arguments as text and as parsed JSON.

    `arguments` is None if the text `raw_arguments` is not a JSON object. The database of sessions stores only
    `raw_arguments`, and parses this text again when a session is restored.
    """

    name: str
    arguments: Mapping[str, Any] | None
    raw_arguments: str = ""


@dataclass(frozen=True, slots=True)
class PastDecision:
    """The tool calls and the outcome of a past decision, which the next prompt may show."""

    tool_calls: tuple[ToolRequest, ...]
    outcome: DecisionOutcome


NO_OPTIONS: Mapping[str, Any] = MappingProxyType({})


class PolicyObservation(list[Message]):
    """What a policy gets for one decision: a list of the prompt's messages, with further facts as attributes.

    Each decision gets a new list.

    Attributes:
        data: the observation as plain values, for scripted policies.
        max_tokens: limit on the number of sampled tokens, at least 1; None means no limit.
        stop: stop strings, at which sampling ends; only agents whose calls are captured can request them.
        options: further settings of such an agent's call, for a policy that implements `FollowsOptions`.
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
    """A tool that a model may call. `task_app.tools.function_tool` converts a function into a tool.

    If a tool has state, each environment object needs its own tool object.
    """

    @property
    def spec(self) -> ToolSpec:
        """Name, description and the JSON Schema of the arguments."""

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the result text; raise `task_app.tools.ToolRefused` for wrong arguments."""


class Environment(Protocol):
    """A task that is played one episode at a time. Its methods are never called from two threads at once.

    `reset` may take milliseconds, because it is called in a thread. If the optional attribute `quick_step` is
    true, `step` is called on the event loop and must take only microseconds. Otherwise `step` is called in a
    thread.
    """

    name: str
    outcome_definition: str

    def reset(self, seed: int) -> Observation:
        """Start an episode in the world of this seed (0 <= seed < 2**31 - 1); may be called repeatedly."""

    def step(self, calls: Sequence[ToolRequest], *, invalid_reason: str | None = None) -> DecisionOutcome:
        """Carry out the calls of one decision, in order.

        If there are no calls, a call is invalid, or `invalid_reason` is given because the model's reply could
        not be read, the decision is refused, and one no-op env step is executed.
        Raises EpisodeOver if the episode has ended or was never started.
        """

    def tools(self) -> tuple[ToolSpec, ...]:
        """Return the tools that a model may call, with JSON Schemas."""

    def messages(self, observation: Observation, past: Sequence[PastDecision]) -> tuple[Message, ...]:
        """Return the next decision's prompt.

        The prompt must depend only on the arguments and the config, because some HTTP routes call this method
        on an environment that was never reset.
        """

    def outcome_reward(self) -> float:
        """Return the score of the episode so far; the attribute `outcome_definition` says what it means."""


def steps_quickly(environment: Environment) -> bool:
    """Return whether the environment promises that a step takes microseconds (`quick_step`)."""
    return bool(getattr(environment, "quick_step", False))


@runtime_checkable
class RestorableEnvironment(Environment, Protocol):
    """An Environment whose state can be saved as bytes and restored.

    Snapshots serve to branch an episode, to start all siblings of a group from one world, and to continue
    sessions after a restart. `snapshot` and `restore` may take milliseconds. `restore` is called on the event
    loop or in a thread, as `step` is; `snapshot` may always be called on the event loop. Clients can send a
    state, so its format must be safe to parse: plain data, never pickle.
    """

    def snapshot(self) -> bytes:
        """Return the state of the episode, without the config, which is stored separately.

        The state must contain everything on which later steps and observations depend.
        Raises EpisodeOver before the first reset.
        """

    def restore(self, state: bytes) -> Observation:
        """Continue from a state, and return the observation that was shown last before the snapshot.

        The snapshot was taken from an environment with the same config, perhaps in another process.
        Raises ValueError if the bytes are no state for this config; the message names the wrong part.
        """


@runtime_checkable
class ReseedableEnvironment(RestorableEnvironment, Protocol):
    """A RestorableEnvironment whose random generator can be given another seed during an episode.

    Without `reseed`, all episodes that begin at the same snapshot draw the same random numbers.
    """

    def reseed(self, seed: int) -> None:
        """Draw all further random numbers from a generator with this seed. The observation must not change.

        Raises EpisodeOver before the first reset.
        """


@runtime_checkable
class ClosableEnvironment(Environment, Protocol):
    """An Environment that uses resources outside of this process: a connection, another process, a window.

    The first `reset` must acquire these resources, not the constructor.
    """

    def close(self) -> None:
        """Release all resources; may take milliseconds. A later reset must acquire the resources again.

        This method is called once, in a thread, when the episode or session has ended for any reason. A step
        that hangs may still run at that moment.
        """


@runtime_checkable
class AnsweredEnvironment(Environment, Protocol):
    """An Environment in which the model may also answer with text instead of tool calls."""

    def answer(self, text: str) -> DecisionOutcome:
        """Carry out a decision that is a text without tool calls.

        If the text is not allowed, the outcome's `invalid_reason` says why. Raises EpisodeOver after the end.
        """


@runtime_checkable
class ConversationalEnvironment(AnsweredEnvironment, Protocol):
    """An Environment whose episode is one growing conversation, instead of a new prompt for each decision.

    The episode loop stores the conversation and may edit it (task_app.episode.history). The prompt is made
    from this history; the method `messages` serves only the HTTP routes for policies. If a decision contains
    several calls, each call is carried out or refused separately: `DecisionOutcome.results` contains a text
    for each call, and `invalid_reason` is the reason for the first refused call. With the class attribute
    `takes_answers = False`, only tool calls are valid decisions: `answer` always returns an `invalid_reason`,
    and requests cannot use an interaction.
    """

    def opening(self) -> tuple[Message, ...]:
        """Return the messages before the first decision. The last one is a user message.

        Only the first message may be a system message. The messages stay the same until the next reset.
        Raises EpisodeOver before the first reset.
        """

    def answer(self, text: str) -> DecisionOutcome:
        """Carry out a decision that is a text without tool calls.

        The outcome's `result` becomes the user's next message, unless an interaction writes this message. If
        `takes_answers` is False, `invalid_reason` says that only tool calls are valid.
        """


def takes_answers(environment: Environment) -> bool:
    """Return whether a text without tool calls can be a valid decision in this environment."""
    return bool(getattr(environment, "takes_answers", True))


@runtime_checkable
class RestorablePolicy(Protocol):
    """An AgentPolicy whose state can be saved and restored, such as its random generator and its memory."""

    def snapshot(self) -> dict[str, Any]:
        """Return the state as JSON-able data. It must not contain an API key."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the policy to a state that `snapshot` returned. Raises ValueError if it is no such state."""


@runtime_checkable
class FollowsOptions(Protocol):
    """An AgentPolicy that follows some settings in `PolicyObservation.options`.

    An agent whose model calls are captured sends these settings; they are named as in Chat Completions.
    """

    @property
    def call_options(self) -> frozenset[str]:
        """Names of followed settings: any of `tool_choice`, `response_format` and `parallel_tool_calls`."""


@runtime_checkable
class CountsTokens(Protocol):
    """An AgentPolicy that can count the tokens of a prompt without sampling an answer."""

    async def count_tokens(self, messages: Sequence[Message], tools: list[dict[str, Any]]) -> int:
        """Return the number of tokens of the prompt. Raises the same errors as `get_action`."""


# action, raw_policy_output, log_probs, value_estimate: see AgentPolicy.get_action.
PolicyAnswer = tuple[dict[str, Any], str | None, dict[str, Any] | None, float | None]


class AgentPolicy(Protocol):
    """Chooses the action of each decision.

    Trajectories contain the policy's optional attribute `name`, or without it the name of the policy's class.

    Source: 2-rollout-worker-and-gigpo.md, Task 2.2.
    """

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        """Choose the next action.

        Args:
            observation: a PolicyObservation, which is the list of the prompt's messages.
            available_tools_specs: the tools that the policy may call, in OpenAI's form with JSON Schemas.

        Returns:
            action: one of four forms.
                One tool call: {"type": "tool_call", "name", "arguments": dict | str}.
                Several tool calls: {"type": "tool_call", "tool_calls": [{"id", "name", "arguments"}, ...]},
                where "content" may contain the text that the model wrote with the calls.
                Only text: {"type": "text", "content": str, "invalid_reason": str | None}.
                To end the episode: {"type": "terminate"}.
            raw_policy_output: all text that the model wrote; None for policies without a model.
            log_probs: a dict with the fields of PolicyLogprobs if the exact tokens are known, otherwise with
                any JSON values. It is stored in the step. The keys "sampling", "model", "prompt_tokens",
                "completion_tokens" and "finish_reason" are recorded separately.
            value_estimate: V(s_t); None for policies without a critic.

        Raises:
            PolicyUnavailable: the model's server gave no usable reply. The rollout then fails.
            ContextLengthExceeded: the prompt is too long. The episode then ends, or fails if no decision is
                complete.
        """


def policy_name(policy: AgentPolicy) -> str:
    return str(getattr(policy, "name", type(policy).__name__))


@runtime_checkable
class RetryingPolicy(Protocol):
    """An AgentPolicy that repeats failed requests to a server.

    `pending_failure` describes the last failure while a request is retried, and is None otherwise. If the
    episode's time limit passes while it is not None, the rollout fails because of the server. Otherwise the
    episode ends at its time limit, as with a slow policy.
    """

    pending_failure: str | None


@runtime_checkable
class RewardFunction(Protocol):
    """Scores whole episodes. The decorator `task_app.reward_functions.reward_function` makes this object.

    It is called only in a child process, which loads it from the operator's file or package.
    """

    mode: RewardMode

    def __call__(self, **facts: Any) -> Any:
        """Score one episode, or in batch mode several episodes.

        Args:
            facts: in pointwise mode, `messages` and `ground_truth` of one episode; `messages` is a
                list[Message] with the prompt, answer and tool results of every decision, in order. In batch
                mode, `rollouts_messages` and `ground_truth`, two lists with one item per episode. There are
                further facts about the episodes, and later versions may add more.

        Returns:
            An EvaluateResult or a dict of its fields; in batch mode, a list with one such value per episode.
            An awaitable of this value is allowed too. The `step_index` of a step output is the number of the
            decision, from 0.
        """


class BaseInteraction:
    """Simulates the user who answers the model. The operator's file of interactions lists subclasses.

    Each episode has its own object. The method signatures are those of verl's class `BaseInteraction`, so
    subclasses of that class run unmodified. As in verl, `generate_response` by default scores every answer
    with 0.8. Each object has its own thread with an event loop, so its methods may block. With the class
    attribute `never_blocks = True`, they run on the service's event loop and must not block.

    Source: 5-interactions.md; DESIGN.md 4.11.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **kwargs: Any) -> str:
        """Begin an episode.

        Args:
            instance_id: a unique id of the episode.
            kwargs: the `interaction_kwargs` of the data row, the interaction's `name`, and `ground_truth` if
                there is one.

        Returns:
            The id that the other methods get as `instance_id`.
        """
        return instance_id or str(uuid4())

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **kwargs: Any
    ) -> tuple[bool, str, float | None, dict[str, Any]]:
        """Answer the last assistant message, and score it.

        Args:
            messages: a copy of the conversation in OpenAI's form; `content` is always text.
            kwargs: those of `start_interaction`.

        Returns:
            should_terminate: whether the episode ends.
            response: the user's next message; not shown to the model if the episode ends.
            score: reward of the decision that is answered; None to give no reward.
            metadata: any further values, which are recorded.
        """
        return False, "Your current result seems acceptable.", 0.8, {}

    async def calculate_score(self, instance_id: str, **kwargs: Any) -> float:
        """Return the current score. `generate_response` may call it, and clients can call it over HTTP."""
        return 0.0

    async def finalize_interaction(self, instance_id: str, **kwargs: Any) -> None:
        """Release the episode's resources. Called once per start, whatever ended the episode."""
