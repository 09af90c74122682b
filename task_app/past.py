"""Functions that several environments share: they make prompt messages, and outcomes of refused decisions."""

from collections.abc import Sequence

from shared_schemas.messages import FunctionCall, Message, ToolCall
from shared_schemas.plain_text import encodable
from task_app.protocols import DecisionOutcome, Observation, PastDecision, ToolRequest


def refuse_decision(observation: Observation, calls: Sequence[ToolRequest], reason: str) -> DecisionOutcome:
    """Return the outcome of a decision whose calls are all refused: one no-op env step with reward 0."""
    reason = encodable(reason)
    text = f"error: {reason}"
    return DecisionOutcome(
        observation, (0.0,), executed_actions=("noop",), invalid_reason=reason,
        result=text, results=(text,) * len(calls),
    )  # fmt: skip


def past_messages(past: Sequence[PastDecision]) -> tuple[Message, ...]:
    """Return the messages that show past decisions to the model.

    A decision with calls becomes an assistant message with the calls and one tool message per call. A
    decision without calls becomes a user message with its result.
    """
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
    """Return a prompt without history, for an environment whose observation shows the whole state.

    The prompt consists of a system message, whose text `system` states the rules, and a user message with the
    observation. If the last call was refused, the user message also says why. If `system` is None, the prompt
    contains only the observation, which suits small models.
    """
    if system is None:
        return (Message(role="user", content=observation.text),)
    reason = past[-1].outcome.invalid_reason if past else None
    text = f"{observation.text}\nWhy: {reason}" if reason else observation.text
    return Message(role="system", content=system), Message(role="user", content=text)
