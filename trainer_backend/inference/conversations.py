"""What the gateway remembers of each rollout, so that a conversation goes on from the exact tokens it had.

Tokenising an earlier answer again may give other ids than were sampled, and writing its tool call again may
give other text. Both would break the prefix, and with it the training sequence, for nothing.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.rendering import ChatRenderer

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered prompt; its first `reused` ids are the whole previous prompt and response of the rollout."""

    text: str
    ids: Sequence[int]
    reused: int = 0


@dataclass(frozen=True, slots=True)
class Turn:
    """The last prompt of a rollout and what was sampled after it.

    Attributes:
        ids: of the prompt and the response together.
        message_count: messages in the prompt; the answer, when it is sent back, is the next one.
        message: the answer as it was given out.
        raw_text, stop_text: the response as sampled, and its stop token apart ("" if there is none).
    """

    prompt_text: str
    ids: Sequence[int]
    message_count: int
    message: JsonObject
    raw_text: str
    stop_text: str


class Conversations:
    """A bounded memory, least recently used first out. Forgetting one costs a full prompt, no more.

    A rollout asks for one decision at a time; of two that overlap, the later answer counts.
    """

    def __init__(self, *, most: int) -> None:
        self._most = most
        self._turns: OrderedDict[str, Turn] = OrderedDict()

    def prompt(
        self,
        rollout_id: str,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        renderer: ChatRenderer,
    ) -> Prompt:
        """Render the messages, going on from the last turn's own ids where they contain it unchanged."""
        turn = self._turns.get(rollout_id)
        if turn is not None and (text := continued_text(turn, messages, tools, renderer)) is not None:
            seen = len(turn.prompt_text) + len(turn.raw_text) + len(turn.stop_text)
            return Prompt(text, [*turn.ids, *renderer.encode(text[seen:])], len(turn.ids))
        text = renderer.prompt_text(messages, tools)
        ids = renderer.encode(text)
        starts_with_turn = turn is not None and ids[: len(turn.ids)] == turn.ids
        return Prompt(text, ids, len(turn.ids) if turn is not None and starts_with_turn else 0)

    def remember(self, rollout_id: str, turn: Turn) -> None:
        self._turns[rollout_id] = turn
        self._turns.move_to_end(rollout_id)
        if len(self._turns) > self._most:
            self._turns.popitem(last=False)


def continued_text(
    turn: Turn, messages: Sequence[JsonObject], tools: Sequence[JsonObject], renderer: ChatRenderer
) -> str | None:
    """The prompt with the last answer as it was sampled; None where the messages or the template changed it.

    The raw text takes the place of the parsed message. If the rendering then does not begin with what the
    model saw and wrote, something was edited, or the template drops it (reasoning): that is another prompt.
    """
    index = turn.message_count
    if len(messages) <= index or not _same_answer(messages[index], turn.message):
        return None
    raw = {"role": "assistant", "content": turn.raw_text}
    try:
        text = renderer.prompt_text([*messages[:index], raw, *messages[index + 1 :]], tools)
    except BadChatRequest:
        return None  # some templates count the turns, and a call counts otherwise than its text
    return text if text.startswith(turn.prompt_text + turn.raw_text + turn.stop_text) else None


def _same_answer(given: JsonObject, answered: JsonObject) -> bool:
    """Clients add and drop empty fields, so only what was said counts."""
    return (
        given.get("role") == "assistant"
        and (given.get("content") or "") == (answered.get("content") or "")
        and _calls(given) == _calls(answered)
    )


def _calls(message: JsonObject) -> list[object]:
    calls = message.get("tool_calls") or []
    return [call.get("function") if isinstance(call, Mapping) else call for call in calls]
