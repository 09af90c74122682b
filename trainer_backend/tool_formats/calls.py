"""Shared code of all tool-call formats: types of parsed replies, and functions that read calls from text."""

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Tools in OpenAI's form: `{"type": "function", "function": {"name": ..., "parameters": JSON Schema}}`.
Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class ParsedCall:
    name: str
    arguments: str  # JSON text of an object


@dataclass(frozen=True, slots=True)
class ParsedReply:
    """A parsed reply. If a call cannot be parsed, `error` is the reason, and `content` is the raw text."""

    content: str
    tool_calls: tuple[ParsedCall, ...] = ()
    error: str | None = None
    reasoning: str = ""
    """Reasoning that the format separates from the content. Reasoning in `<think>…</think>` is not separated:
    it is part of `content`."""


# (the reply's text without its stop token, the offered tools) -> the parsed reply.
ToolParser = Callable[[str, Tools], ParsedReply]
# (text, position, tools) -> the calls that begin at this position of the text, and the position after them.
# Raises ValueError or RecursionError.
ReadCalls = Callable[[str, int, Tools], tuple[list[ParsedCall], int]]


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """The syntax in which a model family writes tool calls."""

    parse: ToolParser
    markers: tuple[str, ...]
    """Strings by which a chat template is recognised: a template that contains one of them has this format,
    unless it contains a marker of an earlier format in `plugins.TOOL_FORMATS`."""
    openers: tuple[str, ...] = ("",)
    """Strings with which a call begins. In a stream, text from the first opener on is held back until the
    reply ends. If "" is an opener, the whole reply is held back."""
    arguments_start: str = r"(?=\{)"
    """Regular expression, searched after the tool's name. The arguments begin at the end of the match."""
    ends: tuple[str, ...] = ()
    """Tokens that end an answer, in addition to the end tokens in the model's files."""
    write: Callable[[Sequence[ParsedCall]], str] | None = None
    """Writes calls as the models do. Used if the chat template does not render the calls of a message."""
    leaves_out_name: Callable[[Tools], bool] = lambda tools: False
    """Returns whether models write calls of these tools without the tool's name."""


def unreadable(text: str, number: int, error: Exception) -> ParsedReply:
    """Return a reply with `text` as content, whose error says that call `number` (from 1) cannot be read."""
    return ParsedReply(text, error=f"tool call {number} cannot be read: {error}")


def read_json(text: str, start: int = 0) -> tuple[object, int]:
    """Parse the JSON value at `start`, skipping white space; return the value and the position after it.

    Raises ValueError if the text is not JSON (NaN and Infinity are not JSON), and RecursionError if the value
    is nested too deeply.
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
    """Skip white space and the first of `tokens` that matches; return the position after this token.

    The token "" always matches. Raises ValueError if no token matches.
    """
    position = skip_space(text, start)
    for token in tokens:
        if text.startswith(token, position):
            return position + len(token)
    if position == len(text):
        raise ValueError(f"{' or '.join(tokens)} is missing")
    raise ValueError(f"expected {' or '.join(tokens)}, found {text[position : position + 20]!r}")


def read_until(text: str, start: int, closing: str) -> tuple[str, int]:
    """Return the text before `closing`, and the position after it. ValueError if `closing` is missing."""
    end = text.find(closing, start)
    if end < 0:
        raise ValueError(f"{closing} is missing")
    return text[start:end], end + len(closing)


def as_call(value: object, *, key: str = "arguments") -> ParsedCall:
    """Convert a parsed JSON object, with the fields `name` and `key` (the arguments), to a call.

    Raises ValueError if a field is missing or has the wrong type.
    """
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get(key) if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError(f'expected {{"name": text, "{key}": object}}')
    # `json.dumps` escapes to ASCII, because the UTF-8 encoder of the reply would fail at a lone surrogate.
    # `allow_nan=False`, because a number such as 1e999 is read as infinity, which JSON cannot express.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments, allow_nan=False))


def as_calls(value: object) -> list[ParsedCall]:
    """Convert a parsed JSON object, or a list of objects, to calls.

    Raises ValueError if the list is empty, or if `as_call` cannot convert an object.
    """
    if value == []:
        raise ValueError("the list of calls is empty")
    return [as_call(item) for item in (value if isinstance(value, list) else [value])]


def write_json(call: ParsedCall) -> str:
    return json.dumps({"name": call.name, "arguments": json.loads(call.arguments)}, ensure_ascii=False)


def argument_schemas(tools: Tools, name: str) -> Mapping[str, Any]:
    """Return the JSON schema of each argument of the tool `name`; an empty mapping for an unknown tool."""
    functions = [tool.get("function") for tool in tools]
    function = next((f for f in functions if isinstance(f, Mapping) and f.get("name") == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def typed_value(text: str, schema: object) -> object:
    """Return the value of an argument that a model wrote as plain text.

    The value is `text` itself if the schema allows only strings, or if `text` is not JSON. Otherwise, it is
    the parsed JSON. Python's True, False and None are also parsed.
    """
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
    """Yield the types that a schema allows, from `type`, `anyOf` and `oneOf`.

    A schema without `type` whose `enum` contains only strings has the type "string".
    """
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
