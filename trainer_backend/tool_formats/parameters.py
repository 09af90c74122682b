"""Reads calls in which each argument is plain text in a tag of its own.

The JSON schema of the tool decides whether the text is a string, or is parsed as JSON.

Qwen3-Coder, Qwen3.5, Nemotron 3:

<tool_call>
<function=interact_many>
<parameter=actions>
["do", "sleep"]
</parameter>
</function>
</tool_call>

GLM-4.5 and later, from 4.7 on without newlines:

<tool_call>interact_many
<arg_key>actions</arg_key>
<arg_value>["do", "sleep"]</arg_value>
</tool_call>
"""

from collections.abc import Mapping
from functools import partial

from trainer_backend.tool_formats.calls import (
    ParsedCall,
    Tools,
    argument_schemas,
    as_call,
    expect,
    read_until,
    skip_space,
    typed_value,
)
from trainer_backend.tool_formats.tags import CLOSE, OPEN, parse_marked

FUNCTION, END_FUNCTION = "<function=", "</function>"
PARAMETER, END_PARAMETER = "<parameter=", "</parameter>"
KEY, END_KEY = "<arg_key>", "</arg_key>"
VALUE, END_VALUE = "<arg_value>", "</arg_value>"


def read_qwen3_coder(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    name, position = read_until(text, expect(text, start, FUNCTION), ">")
    texts: dict[str, str] = {}
    while text.startswith(PARAMETER, skip_space(text, position)):
        key, position = read_until(text, expect(text, position, PARAMETER), ">")
        value, position = read_until(text, position, END_PARAMETER)
        # The first newline on either side belongs to the format; any others belong to the value.
        texts[key] = value.removeprefix("\n").removesuffix("\n")
    position = expect(text, expect(text, position, END_FUNCTION), CLOSE)
    return [_typed_call(name, texts, tools)], position


def read_glm(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    ends = [end for mark in ("\n", KEY, CLOSE) if (end := text.find(mark, skip_space(text, start))) >= 0]
    position = min(ends, default=len(text))
    name = text[start:position].strip()
    if not name:
        raise ValueError("the name of the tool is missing")
    texts: dict[str, str] = {}
    while text.startswith(KEY, skip_space(text, position)):
        key, position = read_until(text, expect(text, position, KEY), END_KEY)
        texts[key.strip()], position = read_until(text, expect(text, position, VALUE), END_VALUE)
    return [_typed_call(name, texts, tools)], expect(text, position, CLOSE)


def _typed_call(name: str, texts: Mapping[str, str], tools: Tools) -> ParsedCall:
    schemas = argument_schemas(tools, name)
    arguments = {key: typed_value(value, schemas.get(key)) for key, value in texts.items()}
    return as_call({"name": name, "arguments": arguments})


parse_qwen3_coder = partial(parse_marked, opening=OPEN, read=read_qwen3_coder)
parse_glm = partial(parse_marked, opening=OPEN, read=read_glm)
