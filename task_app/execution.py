"""One action in its environment, within its time: the half of a decision that costs env steps."""

import asyncio
from dataclasses import replace
from functools import partial

from task_app.actions import ReadAction
from task_app.errors import DeadlineExceeded, boundary
from task_app.guards.threads import Threads, in_thread
from task_app.protocols import (
    ConversationalEnvironment,
    DecisionOutcome,
    Environment,
    Observation,
    steps_quickly,
)


async def execute(
    environment: Environment,
    read: ReadAction,
    *,
    before: Observation,
    timeout_s: float,
    threads: Threads | None,
) -> DecisionOutcome:
    """Carry out what was read of an action. A quick step runs inline: tens of microseconds.

    Args:
        before: what was shown last; a terminate action, which runs no env step, leaves it standing.
        timeout_s: all of an episode's time: what the policy has used up is no fault of the environment.

    Raises:
        CriticalError: the environment raised what it may not raise.
        DeadlineExceeded: its step did not return in time.
        JournalFailed: of an environment that is a living session.
    """
    if read.terminate:
        # No env step: what the last one paid is not paid again.
        return DecisionOutcome(replace(before, reward_last_step=0.0), env_rewards=())
    if read.text is not None and isinstance(environment, ConversationalEnvironment):
        step = partial(environment.answer, read.text)
    else:
        step = partial(environment.step, read.requests, invalid_reason=read.invalid_reason)
    with boundary("environment.step"):
        if steps_quickly(environment):
            return step()
        try:
            async with asyncio.timeout(timeout_s):
                return await in_thread(threads, "environment.step", step)
        except TimeoutError as exc:
            raise DeadlineExceeded("environment.step did not return within limits.timeout_s") from exc
