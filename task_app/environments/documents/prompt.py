"""What a reader is told: the opening of an episode, and the prompt where nobody keeps a history."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.protocols import PastDecision

SYSTEM = """\
You answer a question about a document that is too long to show. Read it with the tools, chunk by chunk or by
searching it, and note what matters. Your context is limited: what you have read and noted can be deleted from
it where the tools for that are offered. When you know the answer, call `finish` with the answer and nothing
else."""

NO_CALL = "no tool call; call one of the tools, and finish with your answer"


def opening(data: Mapping[str, Any]) -> tuple[Message, ...]:
    """The messages before the first decision, of an observation's data."""
    task = Message(role="user", content=data["question"])
    if data["text"] == "compact":
        return (task,)
    told = f"The document has {data['chars']} characters.\n\nQuestion: {data['question']}"
    return Message(role="system", content=SYSTEM), task.model_copy(update={"content": told})


def observation_text(data: Mapping[str, Any]) -> str:
    """How far the reader is; what was read stands in the results of its calls."""
    cut = f"{data['chunks']} chunks, next {data['next_chunk']}" if data["chunks"] else "no index"
    notes = f"notes: {', '.join(data['notes'])}" if data["notes"] else "no notes"
    return f"Question: {data['question']}\n{cut}; {notes}"


def with_past(data: Mapping[str, Any], past: Sequence[PastDecision]) -> tuple[Message, ...]:
    """The opening, and the decisions that are given, as calls and results."""
    messages = list(opening(data))
    for t, decision in enumerate(past):
        calls = tuple(
            ToolCall(id=f"call_{t}_{i}", function=FunctionCall(name=call.name, arguments=call.raw_arguments))
            for i, call in enumerate(decision.tool_calls)
        )
        if not calls:
            messages.append(Message(role="user", content=decision.outcome.result))
            continue
        messages.append(Message(role="assistant", content="", tool_calls=calls))
        messages += [
            Message(role="tool", content=text, tool_call_id=call.id)
            for call, text in zip(calls, decision.outcome.results, strict=True)
        ]
    return tuple(messages)
