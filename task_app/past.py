"""Shared functions of environments: messages of past decisions or of the state, and refused decisions."""

from collections.abc import Sequence

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.plain_text import encodable
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest


def refuse_decision(observation: Observation, calls: Sequence[ToolRequest], reason: str) -> DecisionOutcome:
    """Make the outcome of a decision of which no call is executed: one noop with reward 0."""
    reason = encodable(reason)
    text = f"error: {reason}"
    return DecisionOutcome(
        observation, (0.0,), executed_actions=("noop",), invalid_reason=reason,
        result=text, results=(text,) * len(calls),
    )  # fmt: skip


def past_messages(past: Sequence[PastDecision]) -> tuple[Message, ...]:
    """Make the messages of past decisions: calls and results, or a user's message without calls."""
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
    """Make the messages of an environment whose observation shows its whole state, without a history.

    If `system` is None, for a small model, they have neither the rules nor the reason of a refused last call.
    """
    if system is None:
        return (Message(role="user", content=observation.text),)
    reason = past[-1].outcome.invalid_reason if past else None
    text = f"{observation.text}\nWhy: {reason}" if reason else observation.text
    return Message(role="system", content=system), Message(role="user", content=text)
