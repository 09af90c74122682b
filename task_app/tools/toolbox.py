"""A set of tools: carries out a call of one of them, and limits the length of the result."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from shared_schemas.base import suggest_to_policy
from shared_schemas.messages import ToolSpec
from shared_schemas.plain_text import encodable
from task_app.errors import clipped
from task_app.protocols import Tool, ToolRequest
from task_app.tools.function import ToolRefused

# About 5,000 tokens of English.
MAX_RESULT_CHARS = 20_000


@dataclass(frozen=True, slots=True)
class Answer:
    """The result of a tool call, or the reason why the call was refused."""

    text: str
    """The text that the model reads; for a refused call it begins with "error: "."""
    refused: str | None = None
    """Why the call was not carried out; None if it was."""

    @classmethod
    def of_refusal(cls, reason: str) -> "Answer":
        reason = encodable(reason)
        return cls(f"error: {reason}", reason)


class Toolbox:
    """The tools of one environment, by name.

    A result that is longer than `max_result_chars` is cut, and a note about the cut is appended.
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
        """Carry out one call and return the tool's text, or the reason why the call was refused.

        A call is refused if its name or arguments are wrong, or if the tool raises ToolRefused. All other
        errors of the tool pass to the caller.
        """
        if fault := call_fault(call, self._tools):
            return Answer.of_refusal(fault)
        try:
            text: object = self._tools[call.name].call(call.arguments or {})
        except ToolRefused as exc:
            return Answer.of_refusal(str(exc))
        if not isinstance(text, str):
            excerpt = f"{clipped(repr(text))} ({type(text).__name__})"
            raise TypeError(f"tool {call.name} returned {excerpt}; text is needed")
        return Answer(truncate(encodable(text), self._max_result_chars))


def call_fault(call: ToolRequest, known: Collection[str]) -> str | None:
    """Return what is wrong with a call: an unknown name, or arguments that are no JSON object; else None."""
    name = clipped(call.name)
    if call.name not in known:
        return f"there is no tool {name!r}{suggest_to_policy(name, known)}"
    if call.arguments is None:
        return f"the arguments of {name} are no JSON object: {clipped(call.raw_arguments)!r}"
    return None


def truncate(text: str, max_chars: int) -> str:
    """Return the text unchanged if it is short enough, else its first `max_chars` characters and a note."""
    if len(text) <= max_chars:
        return text
    return f"{text[:max_chars]}\n[cut: the first {max_chars} of {len(text)} characters are shown]"
