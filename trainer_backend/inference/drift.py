"""Would writing or tokenising the last answer again have given other tokens than were sampled? Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.answers import Answer, JsonObject
from trainer_backend.inference.rendering import ASKED, ChatRenderer

# How much of the text before an answer is tokenised with it: its first token may merge with what precedes.
TAIL = 16


@dataclass(frozen=True, slots=True)
class Drift:
    """Of one answer.

    Attributes:
        tokens: its own text, tokenised again, gives other ids.
        text: the template writes the parsed message otherwise; None where it cannot write it by itself.
    """

    tokens: bool
    text: bool | None


def drift_of(
    answer: Answer,
    sampled: Sequence[int],
    before: str,
    messages: Sequence[JsonObject],
    renderer: ChatRenderer,
) -> Drift:
    """Look at one answer alone, so that it costs the same in a conversation of any length.

    Args:
        answer: the last one.
        sampled: its ids, stop token included.
        before: the last TAIL characters that it was sampled after.
        messages: its own as it was sent back, and those behind it: a template may write an answer otherwise
            when it is not the last.
    """
    front = renderer.encode(before)
    again = renderer.encode(before + answer.raw_text + answer.stop_text)
    return Drift(tokens=again != [*front, *sampled], text=_written_otherwise(answer, messages, renderer))


def _written_otherwise(answer: Answer, messages: Sequence[JsonObject], renderer: ChatRenderer) -> bool | None:
    try:
        written = renderer.prompt_text([ASKED, *messages], [])
        return not written.startswith(renderer.asked + answer.raw_text + answer.stop_text)
    except BadChatRequest:
        return None
