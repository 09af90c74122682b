"""Qwen3-Coder: a call as tags, each argument between tags of its own.

<tool_call>
<function=interact_many>
<parameter=actions>
["do", "sleep"]
</parameter>
</function>
</tool_call>
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trainer_backend.tool_formats.reading import ParsedCall, ParsedReply, as_call, read_json
from trainer_backend.tool_formats.tagged import CLOSE, parse_tagged

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# The template writes what is neither text, list nor object as Python prints it.
_AS_PYTHON = {"True": True, "False": False, "None": None}


def parse_qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """The calls of a reply; a value is read as JSON unless its tool says that the argument is a string.

    Source: the chat template of Qwen3-Coder.
    """
    return parse_tagged(text, lambda start: _call(text, start, tools))


def _call(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[ParsedCall, int]:
    name, position = _between(text, start, FUNCTION, ">")
    schemas = _schemas(tools, name)
    arguments: dict[str, object] = {}
    while text[position:].lstrip().startswith(PARAMETER):
        key, position = _between(text, position, PARAMETER, ">")
        written, position = _between(text, position, "", END_PARAMETER)
        # One newline on either side is the format's, any other is the value's.
        written = written.removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(written, schemas.get(key))
    for tag in (END_FUNCTION, CLOSE):
        _, position = _between(text, position, tag, "")
    return as_call({"name": name, "arguments": arguments}), position


def _between(text: str, start: int, opening: str, closing: str) -> tuple[str, int]:
    """What stands between two tags, the first of which comes next, and where the text goes on."""
    if opening:
        rest = text[start:].lstrip()
        if not rest.startswith(opening):
            raise ValueError(f"expected {opening}, found {rest[:20]!r}")
        start = len(text) - len(rest) + len(opening)
    end = text.find(closing, start)
    if end < 0:
        raise ValueError(f"{closing} is missing")
    return text[start:end], end + len(closing)


def _schemas(tools: Sequence[Mapping[str, Any]], name: str) -> Mapping[str, Any]:
    """The schema of each argument of the tool `name`; empty where nothing is known."""
    functions = [tool.get("function") for tool in tools]
    found = next((f for f in functions if isinstance(f, Mapping) and f.get("name") == name), {})
    parameters = found.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(written: str, schema: object) -> object:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return written
    if written in _AS_PYTHON:
        return _AS_PYTHON[written]
    try:
        value, end = read_json(written)
    except json.JSONDecodeError:
        return written
    return value if not written[end:].strip() else written
