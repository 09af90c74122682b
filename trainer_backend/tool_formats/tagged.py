"""Calls between `<tool_call>` and `</tool_call>`, whatever stands in them, behind reasoning if any."""

from collections.abc import Callable

from trainer_backend.tool_formats.reading import ParsedCall, ParsedReply, unreadable

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THOUGHT, END_THOUGHT = "<think>", "</think>"


def parse_tagged(text: str, read_call: Callable[[int], tuple[ParsedCall, int]]) -> ParsedReply:
    """Return the calls of a reply; all other text, reasoning included, stays as content.

    Args:
        read_call: takes the position behind an opening tag; returns the call and the position behind its
            closing tag. Raises ValueError or RecursionError.
    """
    if text.lstrip().startswith(THOUGHT):
        end = text.find(END_THOUGHT)
        if end < 0:
            return ParsedReply(
                text, error=f"the reasoning was not ended with {END_THOUGHT}: no call follows it"
            )
        return _calls(text, end + len(END_THOUGHT), read_call)
    reply = _calls(text, 0, read_call)
    # The opening tag may stand in the prompt, and a call may hold the closing one as text. What was only
    # weighed before the closing tag is no call.
    if END_THOUGHT in text and (reply.error is not None or END_THOUGHT in reply.content):
        return _calls(text, text.index(END_THOUGHT) + len(END_THOUGHT), read_call)
    return reply


def _calls(text: str, position: int, read_call: Callable[[int], tuple[ParsedCall, int]]) -> ParsedReply:
    """The calls from `position` on; what stands before it is content."""
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
