"""The length of a prompt in tokens: the learner has the tokenizer, and the orchestrator has the rows."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol


class LongPrompt(NamedTuple):
    """A prompt that is longer than a limit."""

    place: int
    """Its index among the prompts that were measured."""
    tokens: int
    is_bound: bool = False
    """Whether `tokens` is a lower bound: counting stops far beyond the limit."""


class FindLong(Protocol):
    """Finds the prompts of more than `most` tokens; a prompt is a list of messages, without tools."""

    def __call__(
        self, conversations: Sequence[Sequence[Mapping[str, Any]]], most: int
    ) -> list[LongPrompt]: ...
