"""Calls the methods of an environment, and checks the types of the values that they return.

Every function raises CriticalError if the method raises an unexpected error or returns a wrong type.
"""

from collections.abc import Callable
from typing import Any, TypeVar

from service_kit.boundary import describe_line
from shared_schemas.base import shown
from shared_schemas.messages import ToolSpec
from task_app.errors import CriticalError, boundary
from task_app.protocols import DecisionOutcome, Environment, Observation

T = TypeVar("T")


def reset_environment(environment: Environment, seed: int) -> Observation:
    """Reset the environment with the seed, and return its first observation."""
    with boundary("environment.reset"):
        return _expect(Observation, environment.reset(seed), environment.reset)


def take_decision(step: Callable[..., DecisionOutcome], *arguments: Any, **options: Any) -> DecisionOutcome:
    """Call `step`, which is the method `step` or `answer` of an environment, and return its outcome."""
    with boundary("environment.step"):
        return _expect(DecisionOutcome, step(*arguments, **options), step)


def list_tools(environment: Environment) -> tuple[ToolSpec, ...]:
    """Return the environment's tools; the environment may return them as a list or a tuple."""
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
