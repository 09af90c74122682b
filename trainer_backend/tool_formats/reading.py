"""The shared part of all tool-call formats: the parts of a reply, and how its JSON is read."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """`error` says why a call in the text could not be read; `content` is then the raw text."""

    content: str
    tool_calls: tuple[ParsedCall, ...] = ()
    error: str | None = None


# Takes the text without its stop token, and the offered tools.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedReply]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a model writes calls.

    Attributes:
        marker: what only chat templates of this format hold; "" is of none.
        openers: what a call begins with: a stream holds back what may be one. "" is in every text, which then
            comes at the end.
    """

    parse: ToolParser
    marker: str
    openers: tuple[str, ...] = ("",)


def unreadable(text: str, number: int, error: Exception) -> ParsedReply:
    """Return the whole text with the reason why its call `number` (from 1) cannot be read."""
    return ParsedReply(text, error=f"tool call {number} cannot be read: {error}")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """The JSON value that begins at `start`, after white space, and where the text goes on behind it.

    Raises:
        ValueError: no JSON, or one of NaN and Infinity, which are none.
        RecursionError: nested too deeply.
    """
    body = start + len(text[start:]) - len(text[start:].lstrip())
    value, end = _DECODER.raw_decode(text, body)
    return value, end


def as_call(value: object, *, key: str = "arguments") -> ParsedCall:
    """A call from the object that spells it; `key` holds its arguments.

    Raises:
        ValueError: no object with a name and an object of arguments.
    """
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'expected {{"name": text, "{key}": object}}')
    # ASCII: a lone surrogate, which JSON can spell, must not reach the UTF-8 encoder of the reply.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
