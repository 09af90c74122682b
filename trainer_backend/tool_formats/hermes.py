"""Hermes, Qwen2.5, Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, any number of them."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer_backend.tool_formats.calls import ParsedCall, ParsedReply, as_call, read_json
from trainer_backend.tool_formats.tags import CLOSE, parse_tagged


def parse_hermes(text: str, tools: Sequence[Mapping[str, Any]]) -> ParsedReply:
    """Parse calls with text around them.

    Source: NousResearch's Hermes function calling; Qwen's chat templates.
    """

    def read_call(start: int) -> tuple[ParsedCall, int]:
        # The JSON decoder finds the end, since an argument may contain the closing tag as text.
        value, body_end = read_json(text, start)
        rest = text[body_end:].lstrip()
        if not rest.startswith(CLOSE):
            raise ValueError(f"{CLOSE} is missing after its JSON")
        return as_call(value), len(text) - len(rest) + len(CLOSE)

    return parse_tagged(text, read_call)
