"""Decides after each decision whether the episode ends, and for which reason. Pure.

Source: 2-rollout-worker-and-gigpo.md, Task 2.3. DESIGN.md 4.5 defines the order of the reasons.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_schemas.patterns import LinearPattern
from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import RolloutLimits
from shared_schemas.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """What is known about an episode after a decision, even if this decision could not be completed."""

    decisions_done: int
    invalid_decisions: int = 0
    """Number of decisions that were refused (no call, unknown tool, bad arguments)."""
    elapsed_s: float = 0.0
    """Seconds since the episode began, including the generation of the world."""
    critical_error: bool = False
    """The environment raised an unexpected error."""
    environment_done: bool = False
    """The environment ended the episode, by the rules of the task or by a limit of its own."""
    interaction_done: bool = False
    """The simulated user ended the conversation."""
    terminate_action: bool = False
    """The policy chose the action `terminate`."""
    signal: bool = False
    """The policy's output matches limits.termination_regex."""
    context_exceeded: bool = False
    """The next prompt is too long for the model."""
    sampled_tokens: int = 0
    """Number of sampled tokens of all decisions, as far as the server reports it."""
    user_is_silent: bool = False
    """The simulated user could not answer, because its limit of answers was reached."""


def stop_reason(
    facts: EpisodeFacts, limits: RolloutLimits, *, max_episode_tokens: int | None = None
) -> StopReason | None:
    """Return the first reason that holds, in the order of `StopReason`; None while the episode continues."""
    too_many_tokens = max_episode_tokens is not None and facts.sampled_tokens >= max_episode_tokens
    reasons = (
        (StopReason.CRITICAL_ERROR, facts.critical_error),
        (StopReason.ENVIRONMENT_DONE, facts.environment_done),
        (StopReason.INTERACTION_DONE, facts.interaction_done),
        (StopReason.TERMINATE_ACTION, facts.terminate_action),
        (StopReason.TERMINATION_REGEX, facts.signal),
        (StopReason.INVALID_ACTION, facts.invalid_decisions >= limits.max_invalid_decisions),
        (StopReason.CONTEXT_LENGTH, facts.context_exceeded),
        (StopReason.DEADLINE, facts.elapsed_s >= limits.timeout_s),
        (StopReason.EPISODE_TOKENS, too_many_tokens),
        (StopReason.MAX_USER_TURNS, facts.user_is_silent),
        (StopReason.MAX_DECISIONS, facts.decisions_done >= limits.max_decisions),
    )
    return next((reason for reason, holds in reasons if holds), None)


def termination_signal(limits: RolloutLimits) -> Callable[[str | None, Mapping[str, Any]], bool]:
    """Return a function that says whether a decision matches `limits.termination_regex`.

    The function gets the policy's raw output and its action. If `limits.termination_target` is "raw", it
    matches the raw output, otherwise the action's text. A missing text never matches.
    """
    if limits.termination_regex is None:
        return lambda raw_output, action: False
    pattern = LinearPattern(limits.termination_regex)

    def signals(raw_output: str | None, action: Mapping[str, Any]) -> bool:
        text = raw_output if limits.termination_target == "raw" else action.get("content")
        return isinstance(text, str) and pattern.matches(encodable(text))

    return signals


def ends_by_a_limit(reason: StopReason) -> bool:
    """Return whether an episode with this stop reason was truncated by a limit outside of its environment.

    An episode that the policy ended, by an action or by a text that matches the regex, is terminated and not
    truncated. For ENVIRONMENT_DONE this function returns False, because the environment itself says whether
    it reached a limit of its own.
    """
    return reason in {
        StopReason.INVALID_ACTION,
        StopReason.CONTEXT_LENGTH,
        StopReason.DEADLINE,
        StopReason.EPISODE_TOKENS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_DECISIONS,
    }
