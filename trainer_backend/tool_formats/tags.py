"""Calls between `<tool_call>` and `</tool_call>`, possibly after reasoning.

Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, as_call, read_json, unreadable

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"


def parse_tagged(text: str, read_call: Callable[[int], tuple[ParsedCall, int]]) -> ParsedReply:
    """Return the calls of a reply; all other text, reasoning included, stays as content.

    `read_call` makes of the position behind an opening tag the call and the position behind its closing tag,
    or raises ValueError or RecursionError.
    """
    if text.lstrip().startswith(THINK_START):
        end = text.find(THINK_END)
        if end < 0:
            return ParsedReply(
                text, error=f"the reasoning was not ended with {THINK_END}: no call follows it"
            )
        return _calls(text, end + len(THINK_END), read_call)
    reply = _calls(text, 0, read_call)
    # The prompt may contain the opening tag, and a call the closing one as text. Text before the closing tag
    # is reasoning, not a call.
    if THINK_END in text and (reply.error is not None or THINK_END in reply.content):
        return _calls(text, text.index(THINK_END) + len(THINK_END), read_call)
    return reply


def _calls(text: str, position: int, read_call: Callable[[int], tuple[ParsedCall, int]]) -> ParsedReply:
    """Parse the calls from `position` on; the text before it is content."""
    calls: list[ParsedCall] = []
    content = text[:position]
    while (start := text.find(OPEN, position)) >= 0:
        content += text[position:start]
        try:
            call, position = read_call(start + len(OPEN))
        except (ValueError, RecursionError) as error:
            return unreadable(text, len(calls) + 1, error)
        calls.append(call)
    return ParsedReply((content + text[position:]).strip() if calls else text, tuple(calls))


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse calls with text around them (NousResearch's Hermes function calling; Qwen's chat templates)."""

    def read_call(start: int) -> tuple[ParsedCall, int]:
        # The JSON decoder finds the end, since an argument may contain the closing tag as text.
        value, body_end = read_json(text, start)
        rest = text[body_end:].lstrip()
        if not rest.startswith(CLOSE):
            raise ValueError(f"{CLOSE} is missing after its JSON")
        return as_call(value), len(text) - len(rest) + len(CLOSE)

    return parse_tagged(text, read_call)
