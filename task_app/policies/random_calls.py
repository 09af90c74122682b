"""Draws random tool calls, and defines the base classes of policies with a random generator."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from pydantic import Field

from shared_schemas.base import Body
from task_app.policies.random_values import random_object
from task_app.protocols import PolicyAnswer

Tools = Sequence[Mapping[str, Any]]


def random_call(tools: Tools, source: random.Random, *, longest: int) -> tuple[str, dict[str, Any]]:
    """Return the name of a random tool and random arguments for it.

    The arguments fit the tool's schema, unless `random_object` finds none that fit.

    Args:
        tools: at least one tool, in OpenAI's form.
        longest: length of the lists in the arguments, if their schema allows it.
    """
    # A single tool is chosen without a random number, so the draws depend only on its arguments.
    function = (tools[0] if len(tools) == 1 else source.choice(tools))["function"]
    return function["name"], random_object(function.get("parameters") or {}, source, longest=longest)


class Seeded(Protocol):
    @property
    def seed(self) -> int: ...


C = TypeVar("C", bound=Seeded)


class ByChance(Generic[C]):
    """Base class of policies with a random generator; the snapshot contains the state of the generator.

    A subclass defines `choose`, which has the arguments of `AgentPolicy.get_action`.
    """

    config_type: type[C]

    def __init__(self, config: C | None = None) -> None:
        self.config = config or self.config_type()
        self._random = random.Random(self.config.seed)

    async def choose(self, observation: Any, tools: Tools) -> PolicyAnswer:
        raise NotImplementedError

    async def get_action(
        self, observation: Any, available_tools_specs: list[dict[str, Any]] | None = None
    ) -> PolicyAnswer:
        return await self.choose(observation, available_tools_specs or ())

    def snapshot(self) -> dict[str, Any]:
        version, numbers, gauss = self._random.getstate()
        return {"random": [version, list(numbers), gauss]}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Set the generator to the state in a snapshot; raise ValueError if `state` is no such snapshot."""
        try:
            version, numbers, gauss = state["random"]
            self._random.setstate((version, tuple(numbers), gauss))
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"'random' is no state of a generator: {exc}") from exc


class DetourConfig(Body):
    """Settings of a teacher that sometimes makes a random call."""

    epsilon: float = Field(
        default=0.0, ge=0.0, le=1.0,
        description="probability of a call by chance, marked `exploratory` in its action",
    )  # fmt: skip
    seed: int = Field(default=0, ge=0, strict=True, description="of the calls by chance")


D = TypeVar("D", bound=DetourConfig)


class DetourTeacher(ByChance[D]):
    """Base class of teachers that sometimes act at random (a detour).

    After a detour the student also sees states that the teacher would not reach by itself. The detour itself
    is marked `exploratory` and not imitated.
    """

    def makes_detour(self) -> bool:
        """Draw whether this decision is random; if epsilon is 0, return False without a draw."""
        return bool(self.config.epsilon) and self._random.random() < self.config.epsilon


def call_answer(name: str, arguments: Mapping[str, Any], *, exploratory: bool = False) -> PolicyAnswer:
    call = {"id": "call_0", "name": name, "arguments": json.dumps(arguments)}
    action: dict[str, Any] = {"type": "tool_call", "tool_calls": [call]}
    return (action | {"exploratory": True} if exploratory else action), None, None, None
