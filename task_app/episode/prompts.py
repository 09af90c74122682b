"""How the prompts of an episode come about, as the loop asks for them: here anew for each decision.

What the loop knows of it is `Prompts`; the other way is task_app.episode.conversation.
"""

from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

from shared_schemas.messages import Message, ToolSpec
from shared_schemas.rewards import RewardPart
from shared_schemas.trajectory import StepData, UserAnswer
from task_app.episode.actions import Choice, ReadAction
from task_app.episode.context_tools import Budget
from task_app.errors import boundary
from task_app.protocols import PAST_DECISIONS_SHOWN, DecisionOutcome, Environment, Observation, PastDecision

Execute = Callable[[ReadAction], Awaitable[DecisionOutcome]]


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a decision is made from.

    Attributes:
        messages: all of it.
        reused: how many of them stand where they stood in the prompt before,
        changed: but for these, by place.
        again: gives all of it once more, where holding it would cost the square of a conversation.
    """

    messages: tuple[Message, ...]
    reused: int = 0
    changed: Mapping[int, Message] = field(default_factory=dict)
    again: Callable[[], tuple[Message, ...]] | None = None

    @property
    def new(self) -> tuple[Message, ...]:
        """Those that stand behind the reused ones."""
        return self.messages[self.reused :]


@dataclass(frozen=True, slots=True)
class Carried:
    """What came of a decision; `reward_parts` beside what the environment pays, `answer` for the record, and
    how long the interaction took over it."""

    outcome: DecisionOutcome
    reward_parts: tuple[RewardPart, ...] = ()
    interaction_done: bool = False
    user_is_silent: bool = False
    answer: UserAnswer | None = None
    interaction_s: float = 0.0


class Prompts(Protocol):
    """The conversation side of an episode.

    Attributes:
        tools: what the policy may call.
        past: the last decisions, for environments that show them.
        context_length_penalty: of the last decision, where the next prompt does not fit.
    """

    tools: tuple[ToolSpec, ...]
    context_length_penalty: float

    def opened(self) -> AbstractAsyncContextManager[None]:
        """Keep the interaction open for the whole episode, however it ends."""

    @property
    def past(self) -> Sequence[PastDecision]: ...

    def begin(self, past: Sequence[PastDecision]) -> None:
        """The environment has been brought to its start."""

    def prompt(self, observation: Observation) -> Prompt:
        """Make the prompt of the next decision."""

    async def carry_out(
        self, choice: Choice, read: ReadAction, before: Observation, execute: Execute, budget: Budget
    ) -> Carried:
        """Let the environment, the loop's own tools and the user act on what the policy chose."""

    def remember(self, step: StepData, before: StepData | None) -> None:
        """Let a step know the conversation after it; `before` is the step before it."""

    def outcome(self) -> tuple[float, str]:
        """Return the outcome reward and its definition, for an environment that defines no outcome."""

    def kept(self) -> dict[str, Any]:
        """What the trajectory keeps of the conversation, by field."""


@dataclass(slots=True)
class TokenCount:
    """Tokens of an episode, as the server's last reply counted them; without counts there is no limit.

    Attributes:
        sampled: by the policy, in all decisions.
        context: of the last prompt and what was sampled after it; None where nobody knows.
    """

    sampled: int = 0
    context: int | None = None

    def count(self, log_probs: Mapping[str, Any]) -> None:
        """Another decision; `log_probs` is the third of what `AgentPolicy.get_action` gave."""
        prompt, sampled = log_probs.get("prompt_tokens"), log_probs.get("completion_tokens") or 0
        self.sampled += sampled
        self.context = None if prompt is None else prompt + sampled


def opened_with(opening: Sequence[Message], own: Sequence[Message]) -> tuple[Message, ...]:
    """The opening of a task, then the environment's messages; a prompt has one system message, the first."""
    if any(message.role == "system" for message in opening):
        own = [message for message in own if message.role != "system"]
    return (*opening, *own)


class FreshPrompts:
    """An environment that renders each prompt from its observation and the last decisions.

    Args:
        environment: renders.
        opening: messages of the task, which stand before the environment's in every prompt.
    """

    # No decision is to blame for a prompt that does not fit: none grew out of the one before.
    context_length_penalty = 0.0

    def __init__(self, environment: Environment, opening: Sequence[Message] = ()) -> None:
        self._environment = environment
        self._opening = opening
        self.tools = environment.tools()
        self.past: deque[PastDecision] = deque(maxlen=PAST_DECISIONS_SHOWN)

    def opened(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def begin(self, past: Sequence[PastDecision]) -> None:
        self.past.extend(past)

    def prompt(self, observation: Observation) -> Prompt:
        with boundary("environment.messages"):
            own = self._environment.messages(observation, tuple(self.past))
        return Prompt(opened_with(self._opening, own))

    async def carry_out(
        self, choice: Choice, read: ReadAction, before: Observation, execute: Execute, budget: Budget
    ) -> Carried:
        outcome = await execute(read)
        self.past.append(PastDecision(tool_calls=read.requests, outcome=outcome))
        return Carried(outcome)

    def remember(self, step: StepData, before: StepData | None) -> None:
        step.follow(before)

    def outcome(self) -> tuple[float, str]:
        return 0.0, "none"

    def kept(self) -> dict[str, Any]:
        return {}
