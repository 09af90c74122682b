"""Conversations by hand: a history of calls and results, and edits of it as a model would ask for them."""

import json
from typing import Any

from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.episode.context_tools import CONTEXT_TOOLS, EditResult, apply
from task_app.episode.history import History
from task_app.protocols import ToolRequest

OPENING = (
    Message(role="system", content="You read."),
    Message(role="user", content="Which colour is the harbour?"),
)


def opened(*, shows_ids: bool = True) -> History:
    """System 0, task 1."""
    return History.start(OPENING, shows_ids=shows_ids)


def assistant(msg_id: int, *calls: tuple[str, Any], content: str = "") -> Message:
    """Call ids follow from the message's own id."""
    made = tuple(
        ToolCall(id=f"call-{msg_id}-{i}", function=FunctionCall(name=name, arguments=json.dumps(arguments)))
        for i, (name, arguments) in enumerate(calls)
    )
    return Message(role="assistant", content=content, tool_calls=made or None)


def read(history: History, *texts: str) -> History:
    """After a turn that calls readChunk once for each text, and is answered with them."""
    calls = [("readChunk", {"chunk_id": i}) for i in range(len(texts))]
    message = assistant(len(history), *calls, content="Reading on.")
    history = history.with_message(message)
    for call, text in zip(message.tool_calls or (), texts, strict=True):
        history = history.with_result(call, text)
    return history


def asked(history: History, tool: str, **arguments: Any) -> tuple[History, EditResult]:
    """After a turn that calls a context tool, its result appended; and what the tool did."""
    assert tool in CONTEXT_TOOLS
    message = assistant(len(history), (tool, arguments))
    assert message.tool_calls is not None
    applied = apply(history.with_message(message), ToolRequest(tool, arguments))
    return applied.history.with_result(message.tool_calls[0], applied.text, fields=applied.fields), applied


def edit(history: History, tool: str, **arguments: Any) -> History:
    """The same, for an edit that is expected to be made."""
    history, applied = asked(history, tool, **arguments)
    assert applied.changes_view, applied.text
    return history


def contents(history: History) -> list[str | None]:
    return [message.content for message in history.view()]
