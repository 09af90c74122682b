"""Random arguments for any tool, from its JSON Schema, and the bases of policies with a random generator."""

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from shared_schemas.base import Body
from task_app.protocols import PolicyAnswer

Schema = Mapping[str, Any]

# Bounds for schemas that set none.
_NUMBERS = (0, 9)
_TEXT = "text"


def random_call(
    tools: Sequence[Mapping[str, Any]], source: random.Random, *, longest: int
) -> tuple[str, dict[str, Any]]:
    """Name and arguments of a call that one of the tools accepts.

    Args:
        tools: in OpenAI's form; at least one.
        longest: length of lists, if their schema allows it.
    """
    # A single tool costs no draw, so the calls depend on its arguments alone.
    function = (tools[0] if len(tools) == 1 else source.choice(tools))["function"]
    schema = function.get("parameters") or {}
    value = random_value({"type": "object", **schema}, source, longest=longest, root=schema)
    return function["name"], value


def random_value(schema: Schema, source: random.Random, *, longest: int, root: Schema) -> Any:
    """A value that the schema describes: uniform over enums, with all properties, lists at their longest.

    Patterns and formats of strings are ignored; `root` holds the definitions for `$ref`.
    """

    def inner(part: Schema) -> Any:
        return random_value(part, source, longest=longest, root=root)

    if "$ref" in schema:
        return inner(_definition(schema["$ref"], root))
    for key in ("anyOf", "oneOf"):
        if schema.get(key):
            return inner(source.choice(schema[key]))
    if "const" in schema:
        return schema["const"]
    if schema.get("enum"):
        return source.choice(schema["enum"])
    kind = schema.get("type", "string")
    kind = source.choice(kind) if isinstance(kind, list) else kind
    if kind == "object":
        return {name: inner(part) for name, part in schema.get("properties", {}).items()}
    if kind == "array":
        length = max(min(longest, schema.get("maxItems", longest)), schema.get("minItems", 0))
        return [inner(schema.get("items", {})) for _ in range(length)]
    return _scalar(kind, schema, source)


def _scalar(kind: str, schema: Schema, source: random.Random) -> Any:
    if kind == "boolean":
        return source.random() < 0.5
    if kind == "null":
        return None
    if kind not in ("integer", "number"):
        return _TEXT[: schema.get("maxLength", len(_TEXT))].ljust(schema.get("minLength", 0), ".")
    low, high = _bounds(schema, inside=1 if kind == "integer" else 0)
    return source.randint(int(low), int(high)) if kind == "integer" else source.uniform(low, high)


def _bounds(schema: Schema, *, inside: int) -> tuple[float, float]:
    """Bounds of a number; `inside` is the distance from an exclusive bound. A lone bound gives a width of
    9."""
    low = schema.get("minimum", schema["exclusiveMinimum"] + inside if "exclusiveMinimum" in schema else None)
    high = schema.get(
        "maximum", schema["exclusiveMaximum"] - inside if "exclusiveMaximum" in schema else None
    )
    width = _NUMBERS[1] - _NUMBERS[0]
    if low is None:
        low = _NUMBERS[0] if high is None else min(_NUMBERS[0], high - width)
    return low, max(low, low + width if high is None else high)


def _definition(reference: str, root: Schema) -> Schema:
    part: Any = root
    for name in reference.removeprefix("#/").split("/"):
        if not isinstance(part, Mapping) or name not in part:
            raise ValueError(f"the tool's schema refers to {reference!r}, which it does not define")
        part = part[name]
    assert isinstance(part, Mapping), "a definition is a schema"
    return part


class ByChance:
    """A policy whose only state is a random generator, with the snapshots of a `RestorablePolicy`."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def snapshot(self) -> dict[str, Any]:
        return {"random": chance_state(self._random)}

    def restore(self, state: Mapping[str, Any]) -> None:
        set_chance(self._random, state.get("random"))


class DetourConfig(Body):
    """Settings of a teacher that leaves its way now and then."""

    epsilon: float = Field(
        default=0.0, ge=0.0, le=1.0,
        description="probability of a call by chance, marked `exploratory` in its action",
    )  # fmt: skip
    seed: int = Field(default=0, ge=0, strict=True, description="of the calls by chance")


class DetourTeacher(ByChance):
    """A teacher whose detours are played, and not imitated: so states off its way are in what it teaches."""

    def __init__(self, config: DetourConfig | None = None) -> None:
        self.config = config or DetourConfig()
        super().__init__(self.config.seed)

    def makes_detour(self) -> bool:
        """Draw whether this decision is one by chance; without an epsilon nothing is drawn."""
        return bool(self.config.epsilon) and self._random.random() < self.config.epsilon


def call_answer(name: str, arguments: Mapping[str, Any], *, exploratory: bool = False) -> PolicyAnswer:
    """The answer with that one call and nothing else."""
    call = {"id": "call_0", "name": name, "arguments": json.dumps(arguments)}
    action: dict[str, Any] = {"type": "tool_call", "tool_calls": [call]}
    return (action | {"exploratory": True} if exploratory else action), None, None, None


def chance_state(source: random.Random) -> list[Any]:
    """[version, [625 numbers], next Gaussian or None]."""
    version, numbers, gauss = source.getstate()
    return [version, list(numbers), gauss]


def set_chance(source: random.Random, state: Any) -> None:
    """Set the generator to a state of `chance_state`; ValueError if it is none."""
    try:
        version, numbers, gauss = state
        source.setstate((version, tuple(numbers), gauss))
    except (TypeError, ValueError, OverflowError) as exc:
        raise ValueError(f"'random' is no state of a generator: {exc}") from exc
