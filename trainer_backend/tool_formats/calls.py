"""The common part of all tool-call formats: parsed replies, JSON, and arguments written as plain text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# As in a request, `{"type": "function", "function": {"name": ..., "parameters": JSON Schema}}` each.
Tools = Sequence[Mapping[str, Any]]


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
    reasoning: str = ""
    """Reasoning that the format sets apart from the content; `<think>…</think>` is content instead."""


# Takes the text without its stop token, and the offered tools.
ToolParser = Callable[[str, Tools], ParsedReply]
# Reads the calls that begin at a position of a text; returns them and the position after them. Raises
# ValueError or RecursionError.
ReadCalls = Callable[[str, int, Tools], tuple[list[ParsedCall], int]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """A model's syntax of tool calls."""

    parse: ToolParser
    markers: tuple[str, ...]
    """Texts that only chat templates of this format contain; one is enough."""
    openers: tuple[str, ...] = ("",)
    """Beginnings of a call, which a stream holds back. "" matches every text, which is then sent at the
    end."""
    arguments_start: str = r"(?=\{)"
    """Pattern at whose end a call's arguments begin, after the name of its tool."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to those that the model's files name."""
    write: Callable[[Sequence[ParsedCall]], str] | None = None
    """Writes calls as the models do, for chat templates that leave out the calls of a message."""
    leaves_out_name: Callable[[Tools], bool] = lambda tools: False
    """Whether a call of these tools is written without a name."""


def unreadable(text: str, number: int, error: Exception) -> ParsedReply:
    """Return the whole text with the reason why its call `number` (from 1) cannot be read."""
    return ParsedReply(text, error=f"tool call {number} cannot be read: {error}")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Parse the JSON value at `start`, after white space; return it and the position after it.

    ValueError: it is not JSON, as NaN and Infinity; RecursionError: it is nested too deeply.
    """
    try:
        return _DECODER.raw_decode(text, skip_space(text, start))
    except json.JSONDecodeError as error:
        found = text[error.pos : error.pos + 20]
        raise ValueError(
            f"{error.msg}, found {found!r}" if found else f"{error.msg}, found its end"
        ) from error


def skip_space(text: str, start: int) -> int:
    """Return the position of the first character from `start` on that is not white space."""
    match = _SPACE.match(text, start)
    return match.end() if match else start


def expect(text: str, start: int, *tokens: str) -> int:
    """Return the position after the first of `tokens` that comes next, after white space; "" always does.

    ValueError: none does.
    """
    position = skip_space(text, start)
    for token in tokens:
        if text.startswith(token, position):
            return position + len(token)
    if position == len(text):
        raise ValueError(f"{' or '.join(tokens)} is missing")
    raise ValueError(f"expected {' or '.join(tokens)}, found {text[position : position + 20]!r}")


def read_until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Return the text before the next `closing`, and the position after it. ValueError: it is missing."""
    end = text.find(closing, start)
    if end < 0:
        raise ValueError(f"{closing} is missing")
    return text[start:end], end + len(closing)


def as_call(value: object, *, key: str = "arguments") -> ParsedCall:
    """Convert an object to a call, or raise ValueError; `key` holds its object of arguments."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'expected {{"name": text, "{key}": object}}')
    # ASCII, because a lone surrogate, which JSON can express, would break the UTF-8 encoder of the reply.
    # A number such as 1e999 is infinite, which JSON cannot express.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments, allow_nan=False))


def as_calls(value: object) -> list[ParsedCall]:
    """Convert an object or a list of them to calls, or raise ValueError."""
    if value == []:
        raise ValueError("the list of calls is empty")
    return [as_call(item) for item in (value if isinstance(value, list) else [value])]


def write_json(call: ParsedCall) -> str:
    """Return a call as an object, as models write it."""
    return json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)


def argument_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schema of each argument of the tool `name`; empty if unknown."""
    functions = [tool.get("function") for tool in tools]
    function = next((f for f in functions if isinstance(f, Mapping) and f.get("name") == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def typed_value(text: str, schema: object) -> object:
    """Convert an argument written as plain text: it is JSON unless its schema allows a string alone."""
    types = set(_types(schema))
    is_null = text in ("null", "None") and "null" in types
    if types - {"null"} == {"string"} and not is_null:
        return text
    if text in WORDS:
        return WORDS[text]
    try:
        value, end = read_json(text)
    except ValueError:
        return text
    return value if not text[end:].strip() else text


def _types(schema: object) -> Iterator[str]:
    """Yield the types that a schema allows, as far as it names them itself."""
    if not isinstance(schema, Mapping):
        return
    named = schema.get("type")
    yield from [named] if isinstance(named, str) else filter(_is_text, _items(named))
    for key in ("anyOf", "oneOf"):
        for choice in _items(schema.get(key)):
            yield from _types(choice)
    values = _items(schema.get("enum"))
    if named is None and values and all(map(_is_text, values)):
        yield "string"


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_text(value: object) -> bool:
    return isinstance(value, str)


# Templates print values other than texts, lists and objects in Python's syntax or in that of JSON.
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
