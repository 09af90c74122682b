"""Parses calls of Llama 3.1 to 3.3: the reply is one JSON object, `{"name": ..., "parameters": {...}}`."""

from trainer_backend.tool_formats.calls import (
    ParsedCall,
    ParsedReply,
    Tools,
    as_call,
    read_json,
    unreadable,
)

# Models whose prompt names built-in tools write this tag before a call.
PYTHON_TAG = "<|python_tag|>"


def parse_llama(text: str, tools: Tools) -> ParsedReply:
    """Parse a reply with at most one call, which begins the reply or comes after `<|python_tag|>`.

    A second call is an error: the chat templates of these models refuse a message with two calls.

    Source: Meta's prompt format of Llama 3.1, "JSON based tool calling".
    """
    before, tag, body = text.partition(PYTHON_TAG)
    if not tag and not text.lstrip().startswith("{"):
        return ParsedReply(text)
    try:
        call, rest = _read_call(body if tag else text)
    except (ValueError, RecursionError) as error:
        return unreadable(text, 1, error)
    if rest.lstrip("; \t\r\n").startswith(("{", PYTHON_TAG)):
        return ParsedReply(text, error="a second tool call follows the first; a message holds one")
    return ParsedReply(((before if tag else "") + rest).strip(), (call,))


def _read_call(body: str) -> tuple[ParsedCall, str]:
    value, end = read_json(body)
    # Llama 3.2 also writes `arguments`, as other families do.
    key = "arguments" if isinstance(value, dict) and "parameters" not in value else "parameters"
    return as_call(value, key=key), body[end:]
