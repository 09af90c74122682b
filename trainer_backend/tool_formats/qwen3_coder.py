"""Qwen3-Coder: a call in tags, and each argument in tags of its own.

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

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, as_call, read_json
from trainer_backend.tool_formats.tags import CLOSE, parse_tagged

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
# The template prints values other than texts, lists and objects in Python's syntax.
_AS_PYTHON = {"True": True, "False": False, "None": None}


def parse_qwen3_coder(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse calls as the template has them; a value is JSON unless its tool declares a string."""
    return parse_tagged(text, lambda start: _call(text, start, tools))


def _call(text: str, start: int, tools: Sequence[Mapping[str, Any]]) -> tuple[ParsedCall, int]:
    name, position = _between(text, start, FUNCTION, ">")
    schemas = _schemas(tools, name)
    arguments: dict[str, object] = {}
    while text[position:].lstrip().startswith(PARAMETER):
        key, position = _between(text, position, PARAMETER, ">")
        value_text, position = _between(text, position, "", END_PARAMETER)
        # One newline on either side belongs to the format, further ones to the value.
        value_text = value_text.removeprefix("\n").removesuffix("\n")
        arguments[key] = _value(value_text, schemas.get(key))
    for tag in (END_FUNCTION, CLOSE):
        _, position = _between(text, position, tag, "")
    return as_call({"name": name, "arguments": arguments}), position


def _between(text: str, start: int, opening: str, closing: str) -> tuple[str, int]:
    """Return the text between two tags, the first of which must come next, and the position after it."""
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
    """Return the schema of each argument of the tool `name`; empty if unknown."""
    functions = [tool.get("function") for tool in tools]
    function = next((f for f in functions if isinstance(f, Mapping) and f.get("name") == name), {})
    parameters = function.get("parameters")
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: object) -> object:
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    if text in _AS_PYTHON:
        return _AS_PYTHON[text]
    try:
        value, end = read_json(text)
    except json.JSONDecodeError:
        return text
    return value if not text[end:].strip() else text
