"""Draws random calls of any tool; base classes of policies with a random generator."""

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
    """Return name and arguments of a call that one of the tools accepts, if `random_object` finds one.

    Args:
        tools: at least one, in OpenAI's form.
        longest: length of the lists in the arguments, if their schema allows it.
    """
    # Nothing is drawn to choose from a single tool, so the calls depend only on its arguments.
    function = (tools[0] if len(tools) == 1 else source.choice(tools))["function"]
    return function["name"], random_object(function.get("parameters") or {}, source, longest=longest)


class Seeded(Protocol):
    @property
    def seed(self) -> int: ...


C = TypeVar("C", bound=Seeded)


class ByChance(Generic[C]):
    """A policy whose only state is a random generator, with the snapshots of a `RestorablePolicy`.

    A subclass defines `choose`, with the arguments of `AgentPolicy.get_action`.
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
        """Set the generator to the state in a snapshot; ValueError for anything else."""
        try:
            version, numbers, gauss = state["random"]
            self._random.setstate((version, tuple(numbers), gauss))
        except (KeyError, TypeError, ValueError, OverflowError) as exc:
            raise ValueError(f"'random' is no state of a generator: {exc}") from exc


class DetourConfig(Body):
    """Settings of a teacher that leaves its way now and then."""

    epsilon: float = Field(
        default=0.0, ge=0.0, le=1.0,
        description="probability of a call by chance, marked `exploratory` in its action",
    )  # fmt: skip
    seed: int = Field(default=0, ge=0, strict=True, description="of the calls by chance")


D = TypeVar("D", bound=DetourConfig)


class DetourTeacher(ByChance[D]):
    """A teacher that sometimes plays a random detour, so that the student also sees states off its way.

    The detour itself is not imitated.
    """

    def makes_detour(self) -> bool:
        """Draw whether this decision is random; without an epsilon nothing is drawn."""
        return bool(self.config.epsilon) and self._random.random() < self.config.epsilon


def call_answer(name: str, arguments: Mapping[str, Any], *, exploratory: bool = False) -> PolicyAnswer:
    call = {"id": "call_0", "name": name, "arguments": json.dumps(arguments)}
    action: dict[str, Any] = {"type": "tool_call", "tool_calls": [call]}
    return (action | {"exploratory": True} if exploratory else action), None, None, None
