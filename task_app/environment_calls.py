"""Calls of an environment with checked results; a wrong result is a mistake of the environment's author."""

from collections.abc import Callable
from typing import Any, TypeVar

from service_kit.boundary import describe_line
from shared_schemas.base import shown
from shared_schemas.messages import ToolSpec
from task_app.errors import CriticalError, boundary
from task_app.protocols import DecisionOutcome, Environment, Observation

T = TypeVar("T")


def reset_environment(environment: Environment, seed: int) -> Observation:
    """Start the world of a seed. Raises CriticalError if the environment fails or returns another type."""
    with boundary("environment.reset"):
        return _expect(Observation, environment.reset(seed), environment.reset)


def take_decision(step: Callable[..., DecisionOutcome], *arguments: Any, **options: Any) -> DecisionOutcome:
    """Call `step` or `answer` of an environment; errors as in `reset_environment`."""
    with boundary("environment.step"):
        return _expect(DecisionOutcome, step(*arguments, **options), step)


def list_tools(environment: Environment) -> tuple[ToolSpec, ...]:
    """Return the environment's tools; errors as in `reset_environment`."""
    with boundary("environment.tools"):
        tools: Any = environment.tools()
        listed = _expect(tuple, tuple(tools) if isinstance(tools, list) else tools, environment.tools)
        return tuple(_expect(ToolSpec, tool, environment.tools) for tool in listed)


def _expect(kind: type[T], result: object, method: Callable[..., object]) -> T:
    if isinstance(result, kind):
        return result
    name = getattr(method, "__qualname__", "the environment")
    raise CriticalError(
        f"{name} returned {shown(result)}; {kind.__name__} is needed ({describe_line(method)})"
    )
