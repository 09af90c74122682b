"""Parses replies whose calls stand between an opening and a closing mark. Other text may surround the calls.

Most formats are of this kind. They differ in the marks, and in the syntax of a call between the marks:

Hermes, Qwen2.5, Qwen3, Granite 4: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.
Granite 3, Phi-4-mini: `<|tool_call|>[{"name": ..., "arguments": {...}}, ...]`, optionally `<|/tool_call|>`.
Nemotron Nano 2: `<TOOLCALL>[{"name": ..., "arguments": {...}}, ...]</TOOLCALL>`.
Mistral: `[TOOL_CALLS] [{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name[ARGS]{...}`.
DeepSeek V3, R1, V3.1: a list of names and arguments between marks with wide bars, see `read_deepseek`.
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
    """The marks around reasoning in a reply. `start` may be missing, because the prompt may end with it."""

    start: str
    end: str
    is_apart: bool = False
    """Whether the parser separates reasoning from the content. Needed if chat templates refuse or drop
    reasoning in the content."""


THINK = ReasoningMarks(THINK_START, THINK_END)
MISTRAL_THINK = ReasoningMarks("[THINK]", "[/THINK]")


def split_reasoning(content: str, template: str) -> tuple[str, str]:
    """Return the reasoning at the beginning of a message's content ("" if there is none), and the rest.

    Reasoning is recognised by its marks, but only by marks whose end mark the chat template contains.
    """
    for marks in (THINK, MISTRAL_THINK):
        before, end, rest = content.partition(marks.end)
        if end and end in template:
            return before.rpartition(marks.start)[2].strip(), rest.lstrip()
    return "", content


def parse_marked(
    text: str, tools: Tools, *, opening: str, read: ReadCalls, reasoning: ReasoningMarks = THINK
) -> ParsedReply:
    """Parse a reply into calls and content. All text outside of calls is content.

    Args:
        opening: the mark with which a call begins.
        read: reads the calls after an opening mark, including the closing mark.
        reasoning: the marks around reasoning. Text in the reasoning is never read as a call. Reasoning is
            part of the content unless `reasoning.is_apart`.
    """
    marks = reasoning
    if text.lstrip().startswith(marks.start):
        end = text.find(marks.end)
        if end < 0:
            error = f"the reasoning was not ended with {marks.end}: no call follows it"
            return ParsedReply(text, error=error)
        return _after_reasoning(text, end + len(marks.end), tools, opening, read, marks)
    reply = _parse_calls(text, 0, tools, opening, read)
    # If the prompt contained the start mark, the reply contains only the end mark, and text before the end
    # mark is reasoning, even if it looks like a call. But an end mark in a call's argument is ordinary text.
    if marks.end in text and (reply.error is not None or marks.end in reply.content):
        end = text.index(marks.end) + len(marks.end)
        return _after_reasoning(text, end, tools, opening, read, marks)
    return reply


def _after_reasoning(
    text: str, position: int, tools: Tools, opening: str, read: ReadCalls, marks: ReasoningMarks
) -> ParsedReply:
    """Parse a reply whose reasoning ends at `position`, the position after the end mark."""
    if not marks.is_apart:
        return _parse_calls(text, position, tools, opening, read)
    reply = _parse_calls(text[position:], 0, tools, opening, read)
    thought = text[:position].lstrip().removeprefix(marks.start).removesuffix(marks.end).strip()
    return replace(reply, content=reply.content.strip(), reasoning=thought)


def _parse_calls(text: str, position: int, tools: Tools, opening: str, read: ReadCalls) -> ParsedReply:
    """Parse the calls from `position` on. The text before `position` is content."""
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
    """Read a call or a list of calls in JSON, and then one of the closing marks."""
    # The JSON decoder finds the end of the calls, because an argument may contain a closing mark as text.
    value, end = read_json(text, start)
    return as_calls(value), expect(text, end, *closings)


# NousResearch's Hermes function calling; Qwen's and Granite 4's chat templates.
parse_hermes = partial(parse_marked, opening=OPEN, read=partial(read_json_calls, closings=(CLOSE,)))


def write_hermes(calls: Sequence[ParsedCall]) -> str:
    return "\n".join([f"{OPEN}\n{write_json(call)}\n{CLOSE}" for call in calls])


# IBM's and Microsoft's chat templates. Granite writes no closing mark: its answer ends after the list.
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
    """Read a JSON list of calls (old syntax), or a name and arguments (new syntax). Ids are ignored."""
    if text.startswith("[", skip_space(text, start)):
        value, end = read_json(text, start)
        return as_calls(value), end
    head, *_ = text[start:].split(CALLS, 1)
    name, separator, _ = head.partition(ARGUMENTS)
    if not separator:
        raise ValueError(f"expected a list of calls, or a name and {ARGUMENTS}")
    value, end = read_json(text, start + len(name) + len(ARGUMENTS))
    return [as_call({"name": name.partition(CALL_ID)[0].strip(), "arguments": value})], end


# Mistral's tokenizers v3 to v11 (a list) and from v11 on (a name, then arguments; reasoning from v13 on).
parse_mistral = partial(parse_marked, opening=CALLS, read=read_mistral, reasoning=MISTRAL_THINK)

DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"  # noqa: RUF001
_CALL_OPEN, _SEPARATOR, _CALL_CLOSE = "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"  # noqa: RUF001


def read_deepseek(text: str, start: int, tools: Tools) -> tuple[list[ParsedCall], int]:
    """Read a list of calls. Their arguments are JSON (V3.1), or JSON in a Markdown code block (V3, R1)."""
    calls: list[ParsedCall] = []
    position = start
    while not calls or not text.startswith(_DEEPSEEK_CLOSE, skip_space(text, position)):
        position = expect(text, position, _CALL_OPEN)
        name, position = read_until(text, position, _SEPARATOR)
        is_block = not text.startswith("{", skip_space(text, position))
        if is_block:  # the text before the separator was the type of the call; the name follows it
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
