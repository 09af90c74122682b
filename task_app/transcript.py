"""Pure: the decisions of an episode -> one list of chat messages, for reward functions and people."""

from collections.abc import Sequence

from shared_schemas.messages import Message
from shared_schemas.trajectory import StepData


def transcript(steps: Sequence[StepData]) -> list[Message]:
    """Prompt, answer and tool results of every decision in order; the system message stands once.

    A whole conversation is its own transcript, with what no step holds: what came after the last answer, and
    ids (`task_app.history.History.full_history`).
    """
    messages: list[Message] = []
    for step in steps:
        prompt, reused = step.observation_data.messages, step.observation_data.messages_reused
        if reused:  # a conversation, whose prompt brings the answer before and all that followed it
            del messages[reused:]
        messages.extend(message for message in prompt if not messages or message.role != "system")
        messages.append(_answer(step))
        messages.extend(
            Message(role="tool", content=step.step_info.tool_result, tool_call_id=call.id)
            for call in step.tool_calls
        )
    return messages


def resulting_messages_history(steps: Sequence[StepData], t: int) -> list[Message]:
    """The conversation after decision t (from 0) of an episode; source 2 stores it on the step, so named.

    Raises:
        ValueError: the episode has no decision t.
    """
    if not 0 <= t < len(steps):
        raise ValueError(f"t is {t}; decisions of this episode are 0..{len(steps) - 1}")
    return transcript(steps[: t + 1])


def _answer(step: StepData) -> Message:
    # The raw output of a call holds the call itself, which stands in tool_calls already.
    written = step.action_taken.get("content", step.raw_policy_output) or ""
    return Message(role="assistant", content=written, tool_calls=step.tool_calls or None)
