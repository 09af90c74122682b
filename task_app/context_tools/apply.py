"""Pure: a history and a call of a context tool -> the next history, and the result text of the call."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from shared_schemas.context_tools import CONTEXT_TOOLS as CONTEXT_TOOLS
from shared_schemas.context_tools import PUBLISHED
from shared_schemas.messages import ToolSpec
from task_app.context_tools.editor import Budget, ContextEditor
from task_app.history import History
from task_app.protocols import ToolRequest
from task_app.tools import Toolbox, function_tool


@dataclass(frozen=True, slots=True)
class Applied:
    """What a context tool did.

    Attributes:
        history: with the edit, or the one that was given. The result is not in it yet.
        text: the result of the call.
        fields: the same key by key, where it is an object; a history that shows ids puts them beside these.
        edited: whether the view changed; where it did not, the next prompt continues the one before.
        refused: why the call itself could not be read. An id that is refused is no such reason.
    """

    history: History
    text: str
    edited: bool
    refused: str | None = None
    fields: Mapping[str, Any] | None = None


def context_specs(names: Sequence[str] = PUBLISHED) -> tuple[ToolSpec, ...]:
    """The named context tools, for the loop to offer beside those of the environment."""
    return tuple(_specs()[name] for name in names)


def apply(history: History, call: ToolRequest, *, budget: Budget | None = None) -> Applied:
    """Carry out one call of the last assistant message, whose name is one of CONTEXT_TOOLS.

    Args:
        history: which already holds that assistant message.
        budget: for `checkBudget`.
    """
    editor = ContextEditor(history, budget or Budget())
    answer = _toolbox(editor).answer(call)
    edited = editor.history is not history
    return Applied(editor.history, answer.text, edited, answer.refused, editor.fields)


def _toolbox(editor: ContextEditor) -> Toolbox:
    return Toolbox(function_tool(getattr(editor, name)) for name in CONTEXT_TOOLS)


@cache
def _specs() -> dict[str, ToolSpec]:
    return {name: function_tool(getattr(ContextEditor, name)).spec for name in CONTEXT_TOOLS}
