"""The beginning of a tool call, as the model's own chat template writes it. Pure.

A request that forces a call gets it as the end of its prompt. The rest is sampled as ever: a grammar would
change the distribution that is trained (DESIGN.md 4.9), so the model may still fail to write a whole call.
"""

import re
from dataclasses import dataclass

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.chat_check import ANSWER, NAME, QUESTION, TOOLS
from trainer_backend.inference.rendering import ChatRenderer
from trainer_backend.tool_formats.calls import ToolFormat
from trainer_backend.tool_formats.tags import THINK_START


@dataclass(frozen=True, slots=True)
class CallOpening:
    """What stands in a call before its arguments: text around the name of its tool."""

    lead: str
    """What the template writes before the call: the end of reasoning that the prompt has begun. An empty
    block of reasoning is left out, since templates drop it from earlier answers."""
    before_name: str
    after_name: str
    rest: str
    """The arguments of `chat_check.CALL`, and the end of the call."""

    def carries(self, name: str, tool_format: ToolFormat) -> bool:
        """Whether a whole call of this tool would be read: a quotation mark ends the name in JSON."""
        written = self.before_name + name + self.after_name + self.rest
        return [call.name for call in tool_format.parse(written, TOOLS).tool_calls] == [name]

    def text(self, name: str | None) -> str:
        """The opening but for `lead`, up to what tokenizers join with what follows; None: without a name."""
        if name is None:
            return self.before_name.removesuffix('"').rstrip(" ")
        return self.before_name + name + self.after_name.rstrip(" ")


def find_opening(renderer: ChatRenderer, tool_format: ToolFormat) -> CallOpening | None:
    """Read the opening from a call of the template; None: it does not tell, or the format cannot read it."""
    try:
        written = renderer.answer_text(QUESTION, ANSWER, TOOLS)
    except BadChatRequest:
        return None
    end = renderer.tokenizer.eos_token or ""
    before, name, after = (written or "").removesuffix(end).partition(NAME)
    arguments = re.search(tool_format.arguments_start, after)
    if not name or arguments is None:
        return None
    length = arguments.end()
    starts = [before.find(opener) for opener in tool_format.openers if opener and opener in before]
    start = min(starts, default=0)
    lead = "" if THINK_START in before[:start] else before[:start]
    opening = CallOpening(lead, before[start:], after[:length], after[length:])
    return opening if opening.carries(NAME, tool_format) else None
