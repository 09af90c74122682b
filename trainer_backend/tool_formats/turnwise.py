"""The presets' own format: `<|call|> tool_name {json}`, or `<|call|> item item` for a lone list argument."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, as_call, read_json, unreadable

CALL = "<|call|>"


def parse_turnwise(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse calls. The short form needs a single tool whose only argument is a list of named items."""
    content, *bodies = text.split(CALL)
    short_form = lone_list_argument(tools)
    calls: list[ParsedCall] = []
    for body in bodies:
        try:
            calls.append(_call(body.strip(), short_form))
        except (ValueError, RecursionError) as error:
            return unreadable(text, len(calls) + 1, error)
    return ParsedReply(content, tuple(calls))


def _call(body: str, short_form: tuple[str, str] | None) -> ParsedCall:
    name, _, arguments = body.partition(" ")
    if arguments.lstrip().startswith("{"):
        value, end = read_json(arguments)
        if arguments[end:].strip():
            raise ValueError("text follows its JSON")
        return as_call({"name": name, "arguments": value})
    if short_form is None:
        raise ValueError("expected a tool's name and a JSON object")
    if not body:
        raise ValueError("it names nothing")
    tool, argument = short_form
    return ParsedCall(tool, json.dumps({argument: body.split()}))


def lone_list_argument(tools: Sequence[Mapping[str, Any]]) -> tuple[str, str] | None:
    """Return (tool, argument) if the only tool's only argument is an array of an enum; else None."""
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
