"""Calls whose body is JSON.

Llama 3.1 to 3.3: the reply is a JSON object, `{"name": ..., "parameters": {...}}`, and nothing else.
Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, as_call, read_json, unreadable

# The models write it before a call if they know of built-in tools.
PYTHON_TAG = "<|python_tag|>"
CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def parse_llama(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse one call, at the beginning or after `<|python_tag|>`.

    A second call is an error: the chat templates of these models refuse a message with two.

    Source: Meta's prompt format of Llama 3.1, "JSON based tool calling".
    """
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag and not text.lstrip().startswith("{"):
        return ParsedReply(text)
    try:
        call, rest = _call(body if tag else text)
    except (ValueError, RecursionError) as error:
        return unreadable(text, 1, error)
    if rest.lstrip("; \t\r\n").startswith(("{", PYTHON_TAG)):
        return ParsedReply(text, error="a second tool call follows the first; a message holds one")
    return ParsedReply(((before if tag else "") + rest).strip(), (call,))


def _call(body: str) -> tuple[ParsedCall, str]:
    value, end = read_json(body)
    # Llama 3.2 also uses the key of other families.
    key = "arguments" if isinstance(value, dict) and "parameters" not in value else "parameters"
    return as_call(value, key=key), body[end:]


def parse_mistral(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse the calls of a reply, in the form of either generation; ids written by the model are ignored.

    Source: Mistral's tokenizers v3 to v11 (a list) and v11 on (a name, then its arguments).
    """
    content, *bodies = text.split(CALLS)
    calls: list[ParsedCall] = []
    for body in bodies:
        try:
            new_calls, rest = _read_calls(body)
        except (ValueError, RecursionError) as error:
            return unreadable(text, len(calls) + 1, error)
        calls += new_calls
        content += rest
    return ParsedReply(content.strip() if calls else text, tuple(calls))


def _read_calls(body: str) -> tuple[list[ParsedCall], str]:
    if body.lstrip().startswith("["):
        value, end = read_json(body)
        if not isinstance(value, list) or not value:
            raise ValueError("the list of calls is empty")
        return [as_call(item) for item in value], body[end:]
    name, separator, rest = body.partition(ARGUMENTS)
    if not separator:
        raise ValueError(f"expected a list of calls, or a name and {ARGUMENTS}")
    value, end = read_json(rest)
    name = name.partition(CALL_ID)[0].strip()
    return [as_call({"name": name, "arguments": value})], rest[end:]
