"""Interface by which the orchestrator asks the learner, which has the tokenizer, to find long prompts."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class LongPrompt(NamedTuple):
    """A prompt that has more tokens than a limit."""

    place: int
    """Index of the prompt among the measured prompts."""
    tokens: int
    is_bound: bool = False
    """Whether `tokens` is only a lower bound: tokens far beyond the limit are not counted."""


class FindLong(Protocol):
    """Returns the conversations that, rendered as prompts without tools, have more than `most` tokens."""

    def __call__(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int
    ) -> list[LongPrompt]: ...
