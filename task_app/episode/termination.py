"""Pure: the limits of an episode and the facts after a decision -> why it ends, or None.

Source: 2-rollout-worker-and-gigpo.md, Task 2.3; the order is that of DESIGN.md 4.5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_schemas.json_text import encodable
from shared_schemas.patterns import LinearPattern
from shared_schemas.rollouts import RolloutLimits
from shared_schemas.trajectory import StopReason


@dataclass(frozen=True, slots=True)
class EpisodeFacts:
    """The facts after the last decision, or after the attempt to take one.

    Attributes:
        decisions_done: completed decisions of the episode.
        invalid_decisions: those among them that were refused (no call, unknown tool, bad arguments).
        elapsed_s: since the episode began, world generation included.
        critical_error: the environment raised what it may not raise.
        environment_done: the environment's own end, or a limit inside it.
        interaction_done: who answers as the user has ended the conversation.
        terminate_action: the policy chose to stop.
        pattern_found: what the policy wrote holds the pattern of limits.termination_regex.
        context_exceeded: the next prompt did not fit the model.
        sampled_tokens: of all decisions together, as far as the server counts them.
        user_is_silent: the user has given all the answers that it may, and one was due.
    """

    decisions_done: int
    invalid_decisions: int = 0
    elapsed_s: float = 0.0
    critical_error: bool = False
    environment_done: bool = False
    interaction_done: bool = False
    terminate_action: bool = False
    pattern_found: bool = False
    context_exceeded: bool = False
    sampled_tokens: int = 0
    user_is_silent: bool = False


def stop_reason(
    facts: EpisodeFacts, limits: RolloutLimits, *, max_episode_tokens: int | None = None
) -> StopReason | None:
    """The first reason that holds, in the order of `StopReason`; None while the episode goes on."""
    holds = {
        StopReason.CRITICAL_ERROR: facts.critical_error,
        StopReason.ENVIRONMENT_DONE: facts.environment_done,
        StopReason.INTERACTION_DONE: facts.interaction_done,
        StopReason.TERMINATE_ACTION: facts.terminate_action,
        StopReason.TERMINATION_REGEX: facts.pattern_found,
        StopReason.INVALID_ACTION: facts.invalid_decisions >= limits.max_invalid_decisions,
        StopReason.CONTEXT_LENGTH: facts.context_exceeded,
        StopReason.DEADLINE: facts.elapsed_s >= limits.timeout_s,
        StopReason.EPISODE_TOKENS: max_episode_tokens is not None
        and facts.sampled_tokens >= max_episode_tokens,
        StopReason.MAX_USER_TURNS: facts.user_is_silent,
        StopReason.MAX_DECISIONS: facts.decisions_done >= limits.max_decisions,
    }
    return next((reason for reason in StopReason if holds.get(reason)), None)


def termination_signal(limits: RolloutLimits) -> Callable[[str | None, Mapping[str, Any]], bool]:
    """What says of a raw policy output and its action whether the policy gave the signal to end.

    A policy that is no model writes nothing (None), so that nothing is found in it.
    """
    if limits.termination_regex is None:
        return lambda raw_output, action: False
    pattern = LinearPattern(limits.termination_regex)

    def given(raw_output: str | None, action: Mapping[str, Any]) -> bool:
        text = raw_output if limits.termination_target == "raw" else action.get("content")
        return isinstance(text, str) and pattern.found_in(encodable(text))

    return given


def ends_by_a_limit(reason: StopReason) -> bool:
    """True when the episode was cut off (`truncated`); an environment says so itself.

    A signal of the policy, by action or by pattern, cuts nothing off: the episode has terminated.
    """
    return reason in {
        StopReason.INVALID_ACTION,
        StopReason.CONTEXT_LENGTH,
        StopReason.DEADLINE,
        StopReason.EPISODE_TOKENS,
        StopReason.MAX_USER_TURNS,
        StopReason.MAX_DECISIONS,
    }
