"""The end of an environment: its resources outside of this process are released."""

import asyncio
from contextlib import suppress

from task_app.errors import TaskAppError, boundary
from task_app.protocols import ClosableEnvironment, Environment
from task_app.threads import begin


def close(environment: Environment) -> None:
    """Close it, if it can be closed; an error is logged, since it has no other effect."""
    if isinstance(environment, ClosableEnvironment):
        with suppress(TaskAppError), boundary("environment.close"):
            environment.close()


def begin_close(environment: Environment) -> asyncio.Future[None] | None:
    """Start to close it in its own thread; None if there is nothing to close."""
    if not isinstance(environment, ClosableEnvironment):
        return None
    return begin("environment.close", close, environment)
