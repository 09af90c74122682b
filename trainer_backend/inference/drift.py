"""Measure drift: whether an answer gets other ids if tokenised again, or other text if rendered again."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.answers import Answer
from trainer_backend.inference.rendering import QUESTION, ChatRenderer, JsonObject

# The number of characters before an answer that are tokenised together with the answer, because a token may
# span the boundary.
TAIL = 16


@dataclass(frozen=True, slots=True)
class Drift:
    tokens: bool
    """Whether tokenising the sampled text again gives ids other than the sampled ones."""
    text: bool | None
    """Whether the template writes the parsed message differently from the sampled text. None if the template
    cannot render the message without the conversation before it."""


def measure_drift(
    answer: Answer,
    sampled: Sequence[int],
    before: str,
    messages: Sequence[JsonObject],
    renderer: ChatRenderer,
) -> Drift:
    """Compute the drift of the last answer, in a time that does not depend on the conversation's length.

    Args:
        sampled: the sampled ids of the answer, including a stop token.
        before: the TAIL characters before the answer.
        messages: the answer as the caller sent it back, and the messages after the answer, because a template
            may write an answer differently if it is not the last message.
    """
    again = renderer.encode(before + answer.raw_text + answer.stop_text)
    differs: bool | None = None
    with suppress(BadChatRequest):
        text = renderer.prompt_text([QUESTION, *messages], [])
        differs = not text.startswith(renderer.question + answer.written + answer.stop_text)
    return Drift(tokens=again != [*renderer.encode(before), *sampled], text=differs)


EDITED, FRESH, TOOLS, REASONING, TEMPLATE = "edited", "fresh", "tools", "reasoning", "template"
OTHER_MODEL, UNKNOWN = "other_model", "unknown"
CAUSES = (EDITED, FRESH, OTHER_MODEL, REASONING, TEMPLATE, TOOLS, UNKNOWN)


@dataclass(slots=True)
class ConversationFigures:
    """Counts how often prompts continue their rollout's tokens and how often answers drift, for one policy.

    Only the gateway's thread writes the counts. A prefix is broken if the prompt does not begin with all ids
    of the rollout's previous prompt and response. The causes of a broken prefix are:
        edited: a message before the last answer, or the answer itself, was changed or removed.
        fresh: the request has too few messages to contain the last answer, because each decision has its own
            prompt, or because the request was repeated.
        tools: the request offers tools other than those of the previous request.
        reasoning: nothing was edited, but the template drops the reasoning of an earlier answer.
        template: nothing was edited, but the template changes the earlier text in another way.
        other_model: the last answer came from another policy.
        unknown: the messages contain an answer, but the gateway does not know the rollout: the gateway has
            forgotten it, or the rollout began at another server.
    """

    prefix_extended: int = 0
    """The number of prompts that begin with all ids of the rollout's previous prompt and response."""
    prefix_broken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """The number of prompts with a broken prefix, by cause."""
    drift_checked: int = 0
    """The number of answers that were checked for drift: those that callers sent back unedited."""
    drift_tokens: int = 0
    """The number of checked answers whose text gives other ids if it is tokenised again (`Drift.tokens`)."""
    drift_text: int = 0
    """The number of checked answers that the template writes differently (`Drift.text`)."""
    drift_text_untold: int = 0
    """The number of checked answers that the template cannot render alone (`Drift.text` is None)."""

    def add(self, *, extends: bool, break_cause: str | None, drift: Drift | None) -> None:
        self.prefix_extended += extends
        if break_cause is not None:
            self.prefix_broken[break_cause] += 1
        if drift is not None:
            self.drift_checked += 1
            self.drift_tokens += drift.tokens
            self.drift_text += drift.text is True
            self.drift_text_untold += drift.text is None

    def totals(self) -> dict[str, int]:
        counts = asdict(self)
        broken = counts.pop("prefix_broken")
        return {**counts, **{f"prefix_broken/{cause}": count for cause, count in broken.items()}}
