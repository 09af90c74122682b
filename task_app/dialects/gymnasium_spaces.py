"""gymnasium spaces of what has no shape: a text, a JSON object, a decision."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import gymnasium

from shared_schemas.messages import ToolSpec
from task_app.actions import requests_from_wire
from task_app.policies.random_calls import random_call
from task_app.protocols import ToolRequest

_LONGEST_SAMPLE = 4


class _Loose(gymnasium.Space[Any]):
    """A space without shape or array form. Two of a class are equal, as vector environments ask."""

    @property
    def is_np_flattenable(self) -> bool:
        return False

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash((type(self), self._key()))

    def _key(self) -> str:
        return ""


class TextSpace(_Loose):
    """Any text. gymnasium's own Text bounds length and alphabet, which an observation of ours does not."""

    def contains(self, x: Any) -> bool:
        return isinstance(x, str)

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> str:
        return "".join(self.np_random.choice(list("abc \n"), size=8))


class JsonSpace(_Loose):
    """An object of plain JSON values; which ones is the environment's word."""

    def contains(self, x: Any) -> bool:
        try:
            return isinstance(x, dict) and json.loads(json.dumps(x)) == x
        except (TypeError, ValueError):
            return False

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> dict[str, Any]:
        return {}


class DecisionSpace(_Loose):
    """One decision: a tool call `{"name", "arguments"}`, a list of them, or the names for a tool's one list.

    What it contains can be read; the environment may still refuse it, which costs one no-op (DESIGN.md 4.4).
    """

    def __init__(self, tools: Sequence[ToolSpec], seed: int | None = None) -> None:
        super().__init__(seed=seed)
        self._offered = [tool.model_dump(mode="json") for tool in tools]
        self._name, self._list = _only_list(tools)

    def _key(self) -> str:
        return json.dumps(self._offered, sort_keys=True)

    def contains(self, x: Any) -> bool:
        try:
            self.requests(x)
        except (TypeError, ValueError):
            return False
        return True

    def sample(self, mask: Any | None = None, probability: Any | None = None) -> dict[str, Any]:
        """A random call that one of the tools accepts; masks are not known here."""
        source = random.Random(int(self.np_random.integers(2**63)))
        name, arguments = random_call(self._offered, source, longest=_LONGEST_SAMPLE)
        return {"name": name, "arguments": arguments}

    def requests(self, action: Any) -> tuple[ToolRequest, ...]:
        """The tool calls of an action.

        Raises:
            ValueError: it is neither calls nor names, or names where no tool takes a list alone.
        """
        if isinstance(action, Mapping):
            return requests_from_wire([action])
        if not isinstance(action, list | tuple):
            raise ValueError(f"an action is a tool call or a list of names, not {type(action).__name__}")
        if action and all(isinstance(name, str) for name in action):
            if self._name is None:
                raise ValueError("names alone fit an environment whose only tool takes one list; give a call")
            return requests_from_wire([{"name": self._name, "arguments": {self._list: list(action)}}])
        if not all(isinstance(call, Mapping) for call in action):
            raise ValueError("an action that is a list holds tool calls, or names, and not both")
        return requests_from_wire(action)


def _only_list(tools: Sequence[ToolSpec]) -> tuple[str | None, str]:
    """Tool and argument that a list of names means: of the only tool, its only property, an array."""
    properties = tools[0].function.parameters.get("properties", {}) if len(tools) == 1 else {}
    names = [name for name, part in properties.items() if part.get("type") == "array"]
    return (tools[0].function.name, names[0]) if len(names) == len(properties) == 1 else (None, "")
