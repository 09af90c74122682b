"""Measure drift: whether the last answer, tokenised again, has other ids or, rendered again, other text."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field

from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.answers import Answer
from trainer_backend.inference.rendering import QUESTION, ChatRenderer, JsonObject

# The number of characters before an answer that are tokenised with it, since its first token may merge with
# them.
TAIL = 16


@dataclass(frozen=True, slots=True)
class Drift:
    tokens: bool
    """Whether the sampled text, tokenised again, gives other ids."""
    text: bool | None
    """Whether the template writes the parsed message differently; None if it cannot write a lone message."""


def measure_drift(
    answer: Answer,
    sampled: Sequence[int],
    before: str,
    messages: Sequence[JsonObject],
    renderer: ChatRenderer,
) -> Drift:
    """Compute the drift of the last answer. The cost does not depend on the conversation's length.

    Args:
        sampled: the ids of the answer, stop token included.
        before: the last TAIL characters before the answer.
        messages: the answer as the caller sent it back, and the messages after it: a template may write an
            answer differently if it is not the last message.
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
    """Counts for one policy, and so for one chat template. Only the gateway's thread writes.

    Causes of a broken prefix:
        edited: a message before the last answer, or the answer itself, was changed or removed.
        fresh: the prompt is too short to hold the last answer: each decision has its own prompt, or the
            request was repeated.
        tools: the request offers other tools.
        reasoning: nothing was edited, but the template drops the reasoning of an earlier answer.
        template: nothing was edited, but the template does not continue the sampled text for another reason.
        other_model: the last answer came from another policy.
        unknown: the messages hold an answer of an unknown rollout, forgotten or continued from elsewhere.
    """

    prefix_extended: int = 0
    """Prompts that continue all ids of the rollout's last prompt and response."""
    prefix_broken: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CAUSES, 0))
    """Other prompts, by cause."""
    drift_checked: int = 0
    """Answers that were sent back unedited, each checked once."""
    drift_tokens: int = 0
    """Checked answers whose text gives other ids when tokenised again."""
    drift_text: int = 0
    """Checked answers whose parsed message the template writes differently."""
    drift_text_untold: int = 0
    """Checked answers that the template cannot write alone."""

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
