"""Interface to measure prompts in tokens: the orchestrator has the rows, the learner has the tokenizer."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class LongPrompt(NamedTuple):
    """A prompt that is longer than a limit."""

    place: int
    """Its index among the measured prompts."""
    tokens: int
    is_bound: bool = False
    """Whether `tokens` is a lower bound: counting stops far beyond the limit."""


class FindLong(Protocol):
    """Finds the prompts of more than `most` tokens; a prompt is a list of messages, without tools."""

    def __call__(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int
    ) -> list[LongPrompt]: ...
