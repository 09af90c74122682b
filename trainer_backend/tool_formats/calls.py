"""The common part of all tool-call formats: parsed replies, and JSON in them."""

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
    """A parsed reply. `error` says why a call cannot be parsed; `content` is then the raw text."""

    content: str
    tool_calls: tuple[ParsedCall, ...] = ()
    error: str | None = None


# Takes the text without its stop token, and the offered tools.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedReply]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's syntax of tool calls."""

    parse: ToolParser
    marker: str
    """Text that only chat templates of this format contain; "" matches none."""
    openers: tuple[str, ...] = ("",)
    """Beginnings of a call, which a stream holds back. "" matches every text, which is then sent at the
    end."""
    arguments_start: str = "{"
    """Text with which a call's arguments begin, after the name of its tool."""
    leaves_out_name: Callable[[Sequence[Mapping[str, Any]]], bool] = lambda tools: False
    """Whether a call of these tools is written without a name."""


def unreadable(text: str, number: int, error: Exception) -> ParsedReply:
    """Return the whole text with the reason why its call `number` (from 1) cannot be read."""
    return ParsedReply(text, error=f"tool call {number} cannot be read: {error}")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Parse the JSON value at `start`, after white space; return it and the position after it.

    ValueError: it is not JSON, as NaN and Infinity; RecursionError: it is nested too deeply.
    """
    body = start + len(text[start:]) - len(text[start:].lstrip())
    value, end = _DECODER.raw_decode(text, body)
    return value, end


def as_call(value: object, *, key: str = "arguments") -> ParsedCall:
    """Convert an object to a call, or raise ValueError; `key` holds its object of arguments."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'expected {{"name": text, "{key}": object}}')
    # ASCII, because a lone surrogate, which JSON can express, would break the UTF-8 encoder of the reply.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
