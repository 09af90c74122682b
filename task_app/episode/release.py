"""Closing an environment, which releases its resources outside of this process."""

import asyncio
from contextlib import suppress

from task_app.errors import TaskAppError, boundary
from task_app.protocols import ClosableEnvironment, Environment
from task_app.threads import begin


def close(environment: Environment) -> None:
    """Close an environment that can be closed; an error is only logged."""
    if isinstance(environment, ClosableEnvironment):
        with suppress(TaskAppError), boundary("environment.close"):
            environment.close()


def begin_close(environment: Environment) -> asyncio.Future[None] | None:
    """Begin to close an environment on its own thread; return None if there is nothing to close."""
    if not isinstance(environment, ClosableEnvironment):
        return None
    return begin("environment.close", close, environment)
