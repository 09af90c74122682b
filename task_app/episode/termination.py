"""Decides why an episode ends after a decision, by its limits and the facts. Pure.

Source: 2-rollout-worker-and-gigpo.md, Task 2.3; DESIGN.md 4.5 has the order.
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
    """The facts after the last decision or attempt."""

    decisions_done: int
    invalid_decisions: int = 0
    """Decisions that were refused (no call, unknown tool, bad arguments)."""
    elapsed_s: float = 0.0
    """Time since the episode began, including the generation of the world."""
    critical_error: bool = False
    """The environment raised an unexpected error."""
    environment_done: bool = False
    """The environment ended by itself, or by a limit of its own."""
    interaction_done: bool = False
    """The simulated user ended the conversation."""
    terminate_action: bool = False
    """The policy chose to stop."""
    signal: bool = False
    """The policy's output matches limits.termination_regex."""
    context_exceeded: bool = False
    """The next prompt did not fit the model."""
    sampled_tokens: int = 0
    """Tokens of all decisions, as far as the server counts them."""
    user_is_silent: bool = False
    """The user could not answer, because the limit of answers was reached."""


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
    """Make the function that tells whether a raw policy output, or its action's text, matches the regex.

    `limits.termination_target` says which of the two. A policy without a model has no raw output (None).
    """
    if limits.termination_regex is None:
        return lambda raw_output, action: False
    pattern = LinearPattern(limits.termination_regex)

    def signals(raw_output: str | None, action: Mapping[str, Any]) -> bool:
        text = raw_output if limits.termination_target == "raw" else action.get("content")
        return isinstance(text, str) and pattern.matches(encodable(text))

    return signals


def ends_by_a_limit(reason: StopReason) -> bool:
    """Return whether the reason truncates the episode; False for ENVIRONMENT_DONE: the environment decides.

    An episode that the policy ends, by an action or by matching the regex, is terminated instead.
    """
    return reason in {
        StopReason.INVALID_ACTION,
        StopReason.CONTEXT_LENGTH,
        StopReason.DEADLINE,
        StopReason.EPISODE_TOKENS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_DECISIONS,
    }
