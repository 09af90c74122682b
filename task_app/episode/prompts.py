"""The prompts of the episode loop: the base class `Prompts` and an implementation, `FreshPrompts`.

task_app.episode.conversation contains the other implementation, in which each prompt extends the previous
prompt.
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
    messages: tuple[Message, ...]
    """The whole prompt."""
    reused: int = 0
    """Number of leading messages that are the same as in the previous prompt, except those in `changed`."""
    changed: Mapping[int, Message] = field(default_factory=dict)
    """Those of the first `reused` messages that differ from the previous prompt, by index."""
    again: Callable[[], tuple[Message, ...]] | None = None
    """Rebuilds `messages`. A step stores this function, because storing every whole prompt would take memory
    that grows with the square of the conversation's length."""

    @property
    def new(self) -> tuple[Message, ...]:
        """The messages after the first `reused` messages."""
        return self.messages[self.reused :]


@dataclass(frozen=True, slots=True)
class DecisionEffect:
    """The effect of a decision on the environment and the simulated user."""

    outcome: DecisionOutcome
    reward_parts: tuple[RewardPart, ...] = ()
    """Rewards that do not come from the environment."""
    interaction_done: bool = False
    user_is_silent: bool = False
    answer: UserAnswer | None = None
    """Data about the user's answer that the step's record stores."""
    interaction_s: float = 0.0
    """Seconds that the interaction took to answer."""


class Prompts:
    """Base class: makes the prompts of an episode, and carries out the actions of its policy."""

    tools: tuple[ToolSpec, ...] = ()
    """The tools that the policy may call. `begin` sets them, because some environments can list their tools
    only after a reset."""
    past: Sequence[PastDecision] = ()
    """The most recent decisions, for environments that show them in the next prompt."""
    # 0 by default, because fresh prompts do not depend on the last decision's length.
    context_length_penalty = 0.0
    """Reward of a decision after which the next prompt is too long."""

    def open(self) -> AbstractAsyncContextManager[None]:
        """Return the context manager in which the episode runs. It keeps an interaction, if any, open."""
        return nullcontext()

    def begin(self, past: Sequence[PastDecision]) -> None:
        """Begin the episode, after the environment was reset or restored from a snapshot.

        `past` contains the last decisions before the snapshot.
        """
        raise NotImplementedError

    def prompt(self, observation: Observation) -> Prompt:
        """Make the prompt of the next decision."""
        raise NotImplementedError

    async def carry_out(
        self, choice: Choice, action: Action, before: Observation, execute: Execute, budget: Budget
    ) -> DecisionEffect:
        """Carry out the policy's action with the environment, the context tools and the simulated user."""
        raise NotImplementedError

    def remember(self, step: StepData, before: StepData | None) -> None:
        """Tell `step` how to compute `resulting_messages_history`; `before` is the previous step.

        `resulting_messages_history` is the conversation up to the end of the step.
        """
        step.follow(before)

    def outcome(self) -> tuple[float, str]:
        """Return the outcome reward and its definition; used if the environment defines no outcome."""
        return 0.0, "none"

    def trajectory_fields(self) -> dict[str, Any]:
        """Return the fields of the trajectory that describe the conversation."""
        return {}


@dataclass(slots=True)
class TokenCount:
    """Token counts of an episode, as the policy's server reports them."""

    sampled: int = 0
    """Number of sampled tokens, summed over all decisions."""
    context: int | None = None
    """Number of tokens of the last prompt and its answer; None if the server does not report it."""

    def count(self, log_probs: Mapping[str, Any]) -> None:
        """Add a decision's tokens; `log_probs` is the third value that `AgentPolicy.get_action` returns."""
        prompt, sampled = log_probs.get("prompt_tokens"), log_probs.get("completion_tokens") or 0
        self.sampled += sampled
        self.context = None if prompt is None else prompt + sampled


def open_with(opening: Sequence[Message], own: Sequence[Message]) -> tuple[Message, ...]:
    """Join the task's messages and the environment's own messages.

    If the task has a system message, the system message of the environment is left out.
    """
    if any(message.role == "system" for message in opening):
        own = [message for message in own if message.role != "system"]
    return (*opening, *own)


class FreshPrompts(Prompts):
    """Makes each prompt independently of the previous prompt.

    A prompt consists of `opening` and of the environment's messages for the current observation.
    """

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
