"""Messages of an environment: past decisions for policy routes, which keep no history, or the state alone."""

from collections.abc import Sequence

from shared_schemas.messages import FunctionCall, Message, ToolCall
from task_app.protocols import Observation, PastDecision


def past_messages(past: Sequence[PastDecision]) -> tuple[Message, ...]:
    """Each decision's calls and their results; where it called nothing, the user's answer."""
    messages: list[Message] = []
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


def state_alone(
    observation: Observation, past: Sequence[PastDecision], *, system: str | None
) -> tuple[Message, ...]:
    """The messages of an environment whose state says all that matters, with why the last call was refused.

    Without `system`, the rules, they are the text alone, for a small model.
    """
    if system is None:
        return (Message(role="user", content=observation.text),)
    reason = past[-1].outcome.invalid_reason if past else None
    text = f"{observation.text}\nWhy: {reason}" if reason else observation.text
    return Message(role="system", content=system), Message(role="user", content=text)
