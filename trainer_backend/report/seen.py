"""Pure: what one decision saw, did and earned, in texts, for `turnwise inspect` and the report."""

import json
from collections.abc import Iterator, Sequence

from shared_schemas.messages import Message, ToolCall
from shared_schemas.trajectory import StepData, Trajectory, prompts


def news(step: StepData) -> list[str]:
    """What the prompt of a conversation's decision shows that the one before did not.

    First the messages that were edited since, as they are shown now; then the new ones, but for the model's
    own answer, which stands with the decision that gave it.
    """
    seen = step.observation_data
    own = seen.messages_reused > 0 and seen.messages[:1] and seen.messages[0].role == "assistant"
    new = seen.messages[1:] if own else seen.messages
    edited = [f"message {i} is now {told(message)}" for i, message in sorted(seen.changed.items())]
    return [*edited, *map(told, new)]


def whole_prompts(episode: Trajectory) -> list[list[str]]:
    """Every message of the prompt of each decision."""
    return [[told(message) for message in prompt] for prompt in prompts(episode.steps)]


def last_words(episode: Trajectory) -> list[str]:
    """What a conversation holds after its last answer: results that no prompt showed any more."""
    shown = sum(len(step.observation_data.messages) for step in episode.steps)
    return [told(message) for message in episode.full_history[shown + 1 :]]


def told(message: Message) -> str:
    """A message as `role: what it says`; of calls their names and arguments."""
    return f"{message.role}: {' '.join(_parts(message))}"


def did(step: StepData) -> str:
    """The calls of a decision, or else what it wrote."""
    written = step.action_taken.get("content", step.raw_policy_output)
    return "; ".join(map(_call, step.tool_calls)) or str(written or step.action_taken)


def parts_earned(step: StepData) -> list[str]:
    """What was paid for it beside the environment's own reward."""
    return [f"{part.source} {part.value:+g}" for part in step.reward_parts]


def user_told(step: StepData) -> list[str]:
    """What an interaction said of it that no prompt shows: its words at the end, and its metadata."""
    answer = step.step_info.user_answer
    if answer is None:
        return []
    words = [] if answer.unshown is None else [f"user, not shown: {answer.unshown}"]
    return (
        [*words, f"metadata: {json.dumps(answer.metadata, ensure_ascii=False)}"] if answer.metadata else words
    )


def last_seen(step: StepData) -> str:
    """The last message of its prompt, alone: all of a fresh prompt that changes."""
    return _content(step.observation_data.messages[-1:])


def _content(messages: Sequence[Message]) -> str:
    return "\n".join(str(message.content or "") for message in messages)


def _parts(message: Message) -> Iterator[str]:
    if message.content:
        yield message.content
    yield from map(_call, message.tool_calls or ())


def _call(call: ToolCall) -> str:
    return f"{call.function.name} {call.function.arguments}"
