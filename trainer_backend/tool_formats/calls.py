"""The common part of all tool-call formats: parsed replies, JSON, and arguments written as plain text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Each as in a request: `{"type": "function", "function": {"name": ..., "parameters": JSON Schema}}`.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed reply. If a call cannot be parsed, `error` says why, and `content` is the raw text."""

    content: str
    tool_calls: tuple[ParsedCall, ...] = ()
    error: str | None = None
    reasoning: str = ""
    """Reasoning in a channel of its own; reasoning within `<think>…</think>` is part of the content."""


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
    """Texts that only this format's chat templates contain; a template with any of them has this format."""
    openers: tuple[str, ...] = ("",)
    """Texts that begin a call; a stream holds back the text from there on. "" holds back the whole reply."""
    arguments_start: str = r"(?=\{)"
    """Pattern after the tool's name; the arguments of the call begin where it ends."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to those that the model's files name."""
    write: Callable[[Sequence[ParsedCall]], str] | None = None
    """Writes calls as the models do. Needed where the chat template omits the calls of a message."""
    leaves_out_name: Callable[[Tools], bool] = lambda tools: False
    """Whether a call of these tools is written without a name."""


def unreadable(text: str, number: int, error: Exception) -> ParsedReply:
    """Return the whole text as content, with the reason why call `number` (from 1) cannot be read."""
    return ParsedReply(text, error=f"tool call {number} cannot be read: {error}")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Parse the JSON value at `start`, after white space; return it and the position after it.

    ValueError: not JSON (NaN and Infinity are not); RecursionError: nested too deeply.
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
    """Skip white space and one of `tokens`, the first that matches; return the position after it.

    "" always matches. ValueError: none matches.
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
    """Convert a JSON object to a call, with its arguments under `key`. ValueError: it has no such fields."""
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'expected {{"name": text, "{key}": object}}')
    # `json.dumps` escapes to ASCII: a lone surrogate would break the UTF-8 encoder of the reply.
    # `allow_nan=False`: a number such as 1e999 is read as infinity, which JSON cannot express.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments, allow_nan=False))


def as_calls(value: object) -> list[ParsedCall]:
    """Convert a JSON object, or a list of objects, to calls. ValueError: see `as_call`; or an empty list."""
    if value == []:
        raise ValueError("the list of calls is empty")
    return [as_call(item) for item in (value if isinstance(value, list) else [value])]


def write_json(call: ParsedCall) -> str:
    return json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)


def argument_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the schema of each argument of the tool `name`; empty for an unknown tool."""
    functions = [tool.get("function") for tool in tools]
    function = next((f for f in functions if isinstance(f, Mapping) and f.get("name") == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def typed_value(text: str, schema: object) -> object:
    """Return an argument's value: its text, if that is no JSON or its schema is a string; else parsed."""
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
    """Yield the types that a schema names: in `type`, in `anyOf` or `oneOf`, or by an `enum` of strings."""
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


# Templates print booleans and null as Python does, or as JSON does.
WORDS = {"True": True, "False": False, "None": None, "true": True, "false": False, "null": None}


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_SPACE = re.compile(r"\s*")
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)
