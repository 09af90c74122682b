"""Closes an environment, so that it releases its resources outside of this process."""

import asyncio
from contextlib import suppress

from task_app.errors import TaskAppError, boundary
from task_app.protocols import ClosableEnvironment, Environment
from task_app.threads import begin


def close(environment: Environment) -> None:
    """Close the environment if it is a `ClosableEnvironment`. An error is logged and not raised."""
    if isinstance(environment, ClosableEnvironment):
        with suppress(TaskAppError), boundary("environment.close"):
            environment.close()


def begin_close(environment: Environment) -> asyncio.Future[None] | None:
    """Start to close the environment in a new thread; the returned future is done when it is closed.

    Return None if the environment is not a `ClosableEnvironment`.
    """
    if not isinstance(environment, ClosableEnvironment):
        return None
    return begin("environment.close", close, environment)
