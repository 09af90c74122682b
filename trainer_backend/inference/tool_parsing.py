"""Sampled text to content and tool calls: pure functions that never raise.

A reply whose call cannot be read comes back as text, whole, with the reason: nothing rewrites what was
sampled, and the environment's next prompt can tell the model what was wrong. Whether a tool exists and its
arguments fit is the task app's business.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from transformers import PreTrainedTokenizerFast

from shared_schemas.base import did_you_mean
from trainer_backend.errors import ModelFolderError
from trainer_backend.models.tokenizer import TOOL_CALL_FORMAT_KEY

CALL = "<|call|>"
OPEN, CLOSE = "<tool_call>", "</tool_call>"


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


# The text without its stop token, and the tools that were offered.
ToolParser = Callable[[str, Sequence[Mapping[str, Any]]], ParsedReply]


def parse_text(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """For models without a known tool-call format: everything is text."""
    return ParsedReply(text)


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them, with text around."""
    calls: list[ParsedCall] = []
    content, position = "", 0
    while (start := text.find(OPEN, position)) >= 0:
        content += text[position:start]
        try:
            call, position = _hermes_call(text, start + len(OPEN))
        except (ValueError, RecursionError) as error:
            return ParsedReply(text, error=f"tool call {len(calls) + 1} cannot be read: {error}")
        calls.append(call)
    return ParsedReply((content + text[position:]).strip() if calls else text, tuple(calls))


def _hermes_call(text: str, start: int) -> tuple[ParsedCall, int]:
    """The call whose JSON begins at `start`, and where the text goes on behind its closing tag."""
    body_start = start + len(text[start:]) - len(text[start:].lstrip())
    # raw_decode finds the end of the JSON itself: an argument may contain the closing tag as text.
    value, body_end = _DECODER.raw_decode(text, body_start)
    rest = text[body_end:].lstrip()
    if not rest.startswith(CLOSE):
        raise ValueError(f"{CLOSE} is missing after its JSON")
    return _as_call(value), len(text) - len(rest) + len(CLOSE)


def parse_turnwise(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """The presets' format: `<|call|> tool_name {json}`, or `<|call|> item item` for a lone list argument.

    The short form stands when a single tool is offered whose only argument is a list of named items.
    """
    content, *bodies = text.split(CALL)
    short_form = lone_list_argument(tools)
    calls: list[ParsedCall] = []
    for body in bodies:
        try:
            calls.append(_turnwise_call(body.strip(), short_form))
        except (ValueError, RecursionError) as error:
            return ParsedReply(text, error=f"tool call {len(calls) + 1} cannot be read: {error}")
    return ParsedReply(content, tuple(calls))


def _turnwise_call(body: str, short_form: tuple[str, str] | None) -> ParsedCall:
    name, _, arguments = body.partition(" ")
    if arguments.lstrip().startswith("{"):
        return _as_call({"name": name, "arguments": _DECODER.decode(arguments)})
    if short_form is None:
        raise ValueError("expected a tool's name and a JSON object")
    if not body:
        raise ValueError("it names nothing")
    tool, argument = short_form
    return ParsedCall(tool, json.dumps({argument: body.split()}))


def lone_list_argument(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """(tool, argument) when one tool is offered and its one argument is an array of an enum; else None."""
    if len(tools) != 1 or not isinstance(function := tools[0].get("function"), Mapping):
        return None
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    if not isinstance(properties, Mapping) or len(properties) != 1:
        return None
    ((argument, schema),) = properties.items()
    items = schema.get("items") if isinstance(schema, Mapping) and schema.get("type") == "array" else None
    if not isinstance(items, Mapping) or not items.get("enum"):
        return None
    return str(function.get("name")), str(argument)


def _as_call(value: object) -> ParsedCall:
    name = value.get("name") if isinstance(value, dict) else None
    arguments = value.get("arguments") if isinstance(value, dict) else None
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError('expected {"name": text, "arguments": object}')
    # ASCII: a lone surrogate, which JSON can spell, must not reach the UTF-8 encoder of the reply.
    return ParsedCall(name.encode("utf-8", "replace").decode(), json.dumps(arguments))


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


_DECODER = json.JSONDecoder(parse_constant=_refuse_constant)

TOOL_PARSERS: Mapping[str, ToolParser] = MappingProxyType(
    {"hermes": parse_hermes, "turnwise": parse_turnwise, "text": parse_text}
)


def tool_parser_of(tokenizer: PreTrainedTokenizerFast) -> ToolParser:
    """The parser that tokenizer_config.json names, else the one whose tag the chat template holds.

    Raises:
        ModelFolderError: tokenizer_config.json names a format that is not known here.
    """
    name = tokenizer.init_kwargs.get(TOOL_CALL_FORMAT_KEY)
    if name is None:
        name = "hermes" if OPEN in str(tokenizer.chat_template) else "text"
    if name not in TOOL_PARSERS:
        raise ModelFolderError(
            f"{TOOL_CALL_FORMAT_KEY} is {name!r}{did_you_mean(str(name), TOOL_PARSERS)}",
            where="tokenizer_config.json",
        )
    return TOOL_PARSERS[name]
