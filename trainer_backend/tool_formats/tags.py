"""Calls between two marks, possibly after reasoning and with text around them.

Most formats are of this kind; they differ in the marks and in the syntax between them:

Hermes, Qwen2.5, Qwen3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Granite 3, Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, optionally `<|/tool_call|>`.
Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`.
Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`.
DeepSeek V3, R1, V3.1: a list of names and arguments in marks with wide bars, see `read_deepseek`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from trainer_backend.tool_formats.calls import (
    ParsedCall,
    ParsedReply,
    ReadCalls,
    Tools,
    as_call,
    as_calls,
    expect,
    read_json,
    read_until,
    skip_space,
    unreadable,
    write_json,
)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK_START, THINK_END = "<think>", "</think>"


@dataclass(frozen=True, slots=True)
class ReasoningMarks:
    """The marks around reasoning; the prompt may already contain the first."""

    start: str
    end: str
    is_apart: bool = False
    """Whether reasoning is a field of the message, because templates refuse or drop it in the content."""


THINK = ReasoningMarks(THINK_START, THINK_END)
MISTRAL_THINK = ReasoningMarks("[THINK]", "[/THINK]")


def split_reasoning(content: str, template: str) -> tuple[str, str]:
    """Split a message's content into the reasoning at its beginning ("" if there is none) and the rest.

    Only marks that the chat template contains count.
    """
    for marks in (THINK, MISTRAL_THINK):
        before, end, rest = content.partition(marks.end)
        if end and end in template:
            return before.rpartition(marks.start)[2].strip(), rest.lstrip()
    return "", content


def parse_marked(
    text: str, tools: Tools, *, opening: str, read: ReadCalls, reasoning: ReasoningMarks = THINK
) -> ParsedReply:
    """Parse a reply; all text outside calls is content, including reasoning unless `reasoning.is_apart`.

    `read` starts after an opening mark and ends after the closing mark.
    """
    marks = reasoning
    if text.lstrip().startswith(marks.start):
        end = text.find(marks.end)
        if end < 0:
            error = f"the reasoning was not ended with {marks.end}: no call follows it"
            return ParsedReply(text, error=error)
        return _after_reasoning(text, end + len(marks.end), tools, opening, read, marks)
    reply = _parse_calls(text, 0, tools, opening, read)
    # If the prompt opened the reasoning, the reply has only its end mark, and the text before is no call.
    # An argument of a call may contain the end mark as text.
    if marks.end in text and (reply.error is not None or marks.end in reply.content):
        end = text.index(marks.end) + len(marks.end)
        return _after_reasoning(text, end, tools, opening, read, marks)
    return reply


def _after_reasoning(
    text: str, position: int, tools: Tools, opening: str, read: ReadCalls, marks: ReasoningMarks
) -> ParsedReply:
    """Parse a reply whose reasoning, end mark included, ends at `position`."""
    if not marks.is_apart:
        return _parse_calls(text, position, tools, opening, read)
    reply = _parse_calls(text[position:], 0, tools, opening, read)
    thought = text[:position].lstrip().removeprefix(marks.start).removesuffix(marks.end).strip()
    return replace(reply, content=reply.content.strip(), reasoning=thought)


def _parse_calls(text: str, position: int, tools: Tools, opening: str, read: ReadCalls) -> ParsedReply:
    """Parse the calls from `position` on; the text before it is content."""
    calls: list[ParsedCall] = []
    content = text[:position]
    while (start := text.find(opening, position)) >= 0:
        content += text[position:start]
        try:
            new_calls, position = read(text, start + len(opening), tools)
        except (ValueError, RecursionError) as error:
            return unreadable(text, len(calls) + 1, error)
        calls += new_calls
    return ParsedReply((content + text[position:]).strip() if calls else text, tuple(calls))


def read_json_calls(
    text: str, start: int, tools: Tools, *, closings: tuple[str, ...]
) -> tuple[list[ParsedCall], int]:
    """Read a call, or a list of calls, in JSON, and one of the closing marks.

    The JSON decoder finds the end, because an argument may contain the closing mark as text.
    """
    value, end = read_json(text, start)
    return as_calls(value), expect(text, end, *closings)


# NousResearch's Hermes function calling; Qwen's and Granite 4's chat templates.
parse_hermes = partial(parse_marked, opening=OPEN, read=partial(read_json_calls, closings=(CLOSE,)))


def write_hermes(calls: Sequence[ParsedCall]) -> str:
    return "\n".join([f"{OPEN}\n{write_json(call)}\n{CLOSE}" for call in calls])


# IBM's and Microsoft's chat templates. Granite writes no closing mark: its answer ends with the list.
LIST_OPEN, LIST_CLOSE = "<|tool_call|>", "<|/tool_call|>"
parse_granite3 = partial(
    parse_marked, opening=LIST_OPEN, read=partial(read_json_calls, closings=(LIST_CLOSE, ""))
)

# NVIDIA's chat template.
NEMOTRON_OPEN, NEMOTRON_CLOSE = "<TOOLCALL>", "</TOOLCALL>"
parse_nemotron2 = partial(
    parse_marked, opening=NEMOTRON_OPEN, read=partial(read_json_calls, closings=(NEMOTRON_CLOSE,))
)

CALLS, ARGUMENTS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def read_mistral(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read calls in the old syntax (a JSON list) or the new one (a name and arguments); ids are ignored."""
    if text.startswith("[", skip_space(text, start)):
        value, end = read_json(text, start)
        return as_calls(value), end
    head, *_ = text[start:].split(CALLS, 1)
    name, separator, _ = head.partition(ARGUMENTS)
    if not separator:
        raise ValueError(f"expected a list of calls, or a name and {ARGUMENTS}")
    value, end = read_json(text, start + len(name) + len(ARGUMENTS))
    return [as_call({"name": name.partition(CALL_ID)[0].strip(), "arguments": value})], end


# Mistral's tokenizers v3 to v11 (a list) and v11 on (a name, then its arguments; reasoning from v13 on).
parse_mistral = partial(parse_marked, opening=CALLS, read=read_mistral, reasoning=MISTRAL_THINK)

DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_OPEN, _SEPARATOR, _CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


def read_deepseek(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read a list of calls. Arguments are a JSON object (V3.1), or a Markdown block with one (V3, R1)."""
    calls: list[ParsedCall] = []
    position = start
    while not calls or not text.startswith(_DEEPSEEK_CLOSE, skip_space(text, position)):
        position = expect(text, position, _CALL_OPEN)
        name, position = read_until(text, position, _SEPARATOR)
        is_block = not text.startswith("{", skip_space(text, position))
        if is_block:  # the type of the call comes before the separator, its name after
            name, position = read_until(text, position, "\n")
            position = expect(text, position, "```json")
        value, position = read_json(text, position)
        if is_block:
            position = expect(text, position, "```")
        position = expect(text, position, _CALL_CLOSE)
        calls.append(as_call({"name": name.strip(), "arguments": value}))
    return calls, expect(text, position, _DEEPSEEK_CLOSE)


# DeepSeek's chat templates.
parse_deepseek = partial(parse_marked, opening=DEEPSEEK_OPEN, read=read_deepseek)
