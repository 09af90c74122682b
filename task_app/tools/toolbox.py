"""The tools of one environment: which one a call names, and what it answers, within bounds."""

from collections.abc import Iterable
from dataclasses import dataclass

from shared_schemas.base import did_you_mean
from shared_schemas.json_text import encodable
from shared_schemas.messages import ToolSpec
from task_app.errors import clipped
from task_app.protocols import Tool, ToolRequest
from task_app.tools.function import ToolRefused

# About 5,000 tokens of English.
MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Answer:
    """What a call came to.

    Attributes:
        text: for the model; of a refused call it begins with "error: ".
        refused: why the call was not carried out; None when it was.
    """

    text: str
    refused: str | None = None

    @classmethod
    def of_refusal(cls, reason: str) -> "Answer":
        reason = encodable(reason)
        return cls(f"error: {reason}", reason)


class Toolbox:
    """Tools by name.

    Args:
        tools: no two with one name.
        max_result_chars: a longer result is cut, and says so.
    """

    def __init__(self, tools: Iterable[Tool], *, max_result_chars: int = MAX_RESULT_CHARS) -> None:
        self._tools: dict[str, Tool] = {}
        for tool in tools:
            name = tool.spec.function.name
            if name in self._tools:
                raise ValueError(f"two tools are named {name!r}; a model could call only one of them")
            self._tools[name] = tool
        self._max_result_chars = max_result_chars

    def specs(self) -> tuple[ToolSpec, ...]:
        return tuple(tool.spec for tool in self._tools.values())

    def answer(self, call: ToolRequest) -> Answer:
        """Carry out one call, or say why not. What the tool's own code raises beside ToolRefused passes.

        Raises:
            TypeError: the tool returned no text; a fault of the plug-in.
        """
        tool = self._tools.get(call.name)
        if tool is None:
            name = clipped(call.name)
            return Answer.of_refusal(f"there is no tool {name!r}{did_you_mean(name, self._tools)}")
        if call.arguments is None:
            found = clipped(call.raw_arguments)
            return Answer.of_refusal(f"the arguments of {call.name} are no JSON object: {found!r}")
        try:
            text: object = tool.call(call.arguments)
        except ToolRefused as exc:
            return Answer.of_refusal(str(exc))
        if not isinstance(text, str):
            found = f"{clipped(repr(text))} ({type(text).__name__})"
            raise TypeError(f"tool {call.name} returned {found}; text is needed")
        return Answer(bounded(encodable(text), self._max_result_chars))


def bounded(text: str, max_chars: int) -> str:
    """The beginning of a text that is too long, with a note that says so."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters are shown]"
