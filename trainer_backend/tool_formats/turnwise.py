"""Parses calls in the presets' own format: `<|call|> tool_name {json}`, or a short form.

The short form is used if there is only one tool, and its only argument is an enum value or a list of enum
values. It contains only the argument: `<|call|> item` for a value, `<|call|> item item` for a list. The
presets' chat template (models/tokenizer.py) writes calls by the same rule.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from trainer_backend.tool_formats.calls import (
    ParsedCall,
    ParsedReply,
    Tools,
    argument_schemas,
    as_call,
    read_json,
    unreadable,
)

CALL = "<|call|>"


@dataclass(frozen=True, slots=True)
class ShortForm:
    """The tool and the argument of all calls in the short form, which contain only the argument's value."""

    tool: str
    argument: str
    is_list: bool

    @classmethod
    def of(cls, tools: Tools) -> "ShortForm | None":
        """Return the short form for calls of these tools; None if their calls have no short form."""
        if len(tools) != 1 or not isinstance(function := tools[0].get("function"), Mapping):
            return None
        properties = argument_schemas(tools, function.get("name", ""))
        if len(properties) != 1:
            return None
        ((argument, schema),) = properties.items()
        kind = schema.get("type") if isinstance(schema, Mapping) else None
        named = schema.get("items") if kind == "array" else schema
        if kind not in ("array", "string") or not isinstance(named, Mapping) or not named.get("enum"):
            return None
        return cls(str(function.get("name")), str(argument), kind == "array")

    def call(self, body: str) -> ParsedCall:
        return ParsedCall(self.tool, json.dumps({self.argument: body.split() if self.is_list else body}))


def parse_turnwise(text: str, tools: Tools) -> ParsedReply:
    content, *bodies = text.split(CALL)
    short_form = ShortForm.of(tools)
    calls: list[ParsedCall] = []
    for body in bodies:
        try:
            calls.append(_read_call(body.strip(), short_form))
        except (ValueError, RecursionError) as error:
            return unreadable(text, len(calls) + 1, error)
    return ParsedReply(content, tuple(calls))


def _read_call(body: str, short_form: ShortForm | None) -> ParsedCall:
    name, _, arguments = body.partition(" ")
    if arguments.lstrip().startswith("{"):
        value, end = read_json(arguments)
        if arguments[end:].strip():
            raise ValueError("text follows the call's JSON")
        return as_call({"name": name, "arguments": value})
    if short_form is None:
        raise ValueError("expected a tool's name and a JSON object")
    if not body:
        raise ValueError("the call is empty")
    return short_form.call(body)
