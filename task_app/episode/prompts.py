"""How the episode loop gets its prompts: the base `Prompts`, and prompts made for each decision alone.

task_app.episode.conversation has the other implementation.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from shared_schemas.messages import Message, ToolSpec
from shared_schemas.trajectory import RewardPart, StepData, UserAnswer
from task_app.environment_calls import list_tools
from task_app.episode.actions import Action, Choice
from task_app.episode.context_tools import Budget
from task_app.errors import boundary
from task_app.protocols import PAST_DECISIONS_SHOWN, DecisionOutcome, Environment, Observation, PastDecision

Execute = Callable[[Action], Awaitable[DecisionOutcome]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """The prompt of a decision."""

    messages: tuple[Message, ...]
    """The whole prompt."""
    reused: int = 0
    """Number of leading messages that the previous prompt had at the same places, except `changed`."""
    changed: Mapping[int, Message] = field(default_factory=dict)
    """Places of messages among `reused` that differ from the previous prompt."""
    again: Callable[[], tuple[Message, ...]] | None = None
    """Makes the messages once more, because holding those of every prompt of a conversation would cost memory
    that grows with the square of its length."""

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages after the reused ones."""
        return self.messages[self.reused :]


@dataclass(frozen=True, slots=True)
class DecisionEffect:
    """The effect of a decision: the outcome in the environment, and the user's part in it."""

    outcome: DecisionOutcome
    reward_parts: tuple[RewardPart, ...] = ()
    """Rewards that the environment did not give."""
    interaction_done: bool = False
    user_is_silent: bool = False
    answer: UserAnswer | None = None
    """The user's answer, for the record."""
    interaction_s: float = 0.0
    """How long the interaction took."""


class Prompts:
    """Makes the prompts of an episode and carries out its actions; without a conversation of its own."""

    tools: tuple[ToolSpec, ...] = ()
    """The tools that the policy may call, from `begin` on: a foreign environment knows them then."""
    past: Sequence[PastDecision] = ()
    """The last decisions, for environments that show them."""
    # Each prompt is independent of the last decision, so none can be blamed for its length.
    context_length_penalty = 0.0
    """Reward of a decision after which the next prompt does not fit."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """Keep the interaction open for the whole episode, however it ends."""
        return nullcontext()

    def begin(self, past: Sequence[PastDecision]) -> None:
        """Begin the episode; the environment is at its start."""
        raise NotImplementedError

    def prompt(self, observation: Observation) -> Prompt:
        """Make the prompt of the next decision."""
        raise NotImplementedError

    async def carry_out(
        self, choice: Choice, action: Action, before: Observation, execute: Execute, budget: Budget
    ) -> DecisionEffect:
        """Let the environment, the loop's own tools and the user act on the policy's choice."""
        raise NotImplementedError

    def remember(self, step: StepData, before: StepData | None) -> None:
        """Give the step access to the conversation after it; `before` is the step before it."""
        step.follow(before)

    def outcome(self) -> tuple[float, str]:
        """The outcome reward and its definition, for an environment that defines no outcome."""
        return 0.0, "none"

    def trajectory_fields(self) -> dict[str, Any]:
        """Fields of the trajectory that hold the conversation."""
        return {}


@dataclass(slots=True)
class TokenCount:
    """Tokens of an episode, as the server's last reply counted them."""

    sampled: int = 0
    """Tokens of the policy, in all decisions."""
    context: int | None = None
    """Tokens of the last prompt and its answer; None if the server does not count them."""

    def count(self, log_probs: Mapping[str, Any]) -> None:
        """Add a decision; `log_probs` is the third element of `AgentPolicy.get_action`'s tuple."""
        prompt, sampled = log_probs.get("prompt_tokens"), log_probs.get("completion_tokens") or 0
        self.sampled += sampled
        self.context = None if prompt is None else prompt + sampled


def open_with(opening: Sequence[Message], own: Sequence[Message]) -> tuple[Message, ...]:
    """The task's messages, then the environment's; only the first system message is kept."""
    if any(message.role == "system" for message in opening):
        own = [message for message in own if message.role != "system"]
    return (*opening, *own)


class FreshPrompts(Prompts):
    """The `opening`, then what the environment renders from its observation and the last decisions."""

    def __init__(self, environment: Environment, opening: Sequence[Message] = ()) -> None:
        self._environment = environment
        self._opening = opening
        self.past: deque[PastDecision] = deque(maxlen=PAST_DECISIONS_SHOWN)

    def begin(self, past: Sequence[PastDecision]) -> None:
        self.tools = list_tools(self._environment)
        self.past.extend(past)

    def prompt(self, observation: Observation) -> Prompt:
        with boundary("environment.messages"):
            own = self._environment.messages(observation, tuple(self.past))
        return Prompt(open_with(self._opening, own))

    async def carry_out(
        self, choice: Choice, action: Action, before: Observation, execute: Execute, budget: Budget
    ) -> DecisionEffect:
        outcome = await execute(action)
        self.past.append(PastDecision(tool_calls=action.requests, outcome=outcome))
        return DecisionEffect(outcome)
