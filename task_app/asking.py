"""One question to a policy, within its time: the half of a decision that waits for a model."""

import asyncio
from typing import Any

from task_app.actions import Choice, ReadAction, read_action
from task_app.errors import PolicyUnavailable, boundary
from task_app.protocols import AgentPolicy, PolicyObservation, RetryingPolicy, policy_name


async def ask(
    policy: AgentPolicy, observation: PolicyObservation, tools: list[dict[str, Any]], *, timeout_s: float
) -> tuple[Choice, ReadAction] | None:
    """What the policy chose; None: it was too slow, which is its own doing and ends the episode.

    Raises:
        PolicyUnavailable: the model could not be asked; also where the time ran out meanwhile.
        ContextLengthExceeded: the prompt does not fit.
        CriticalError: the policy raised what it may not raise, or its action is none.
    """
    try:
        async with asyncio.timeout(max(0.0, timeout_s)):
            with boundary(f"policy {policy_name(policy)}"):
                action, raw, log_probs, value = await policy.get_action(observation, tools)
                return Choice(action, raw, log_probs or {}, value), read_action(action)
    except TimeoutError as exc:
        pending = policy.pending_failure if isinstance(policy, RetryingPolicy) else None
        if pending is not None:
            raise PolicyUnavailable(f"limits.timeout_s passed during an outage: {pending}") from exc
        return None
