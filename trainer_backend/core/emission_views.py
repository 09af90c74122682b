"""Finds the prompt and the token positions of each answer of an episode in its segments. Pure functions.

Source 3 (docs/terms.md) calls them `emission_views` and `assistant_turn_boundaries`, and records them during
an episode. In segments, each answer follows the exact prompt from which it was sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer_backend.core.segments import Segment


@dataclass(frozen=True, slots=True)
class EmissionView:
    turn: int
    """Number of the decision, from 1."""
    segment: int
    """Index of the segment that trains the decision."""
    prompt_ids: tuple[int, ...]
    """[start] token ids of the prompt: all ids of the segment before the answer."""
    answer_ids: tuple[int, ...]
    """[end - start] token ids of the sampled answer."""
    start: int
    end: int
    """`start` and `end` delimit the answer in the segment's token ids; `end` is exclusive."""


def assistant_turn_boundaries(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """Yield (decision t, start, end) of each answer that the segment trains; `end` is exclusive.

    Source: 3-context-editing-tool-loop.md ("List of (start_idx, end_idx) tuples").
    """
    answer: tuple[int, int, int] | None = None
    for start, end, decision, _, _ in segment.spans.tolist():
        if answer is not None and answer[::2] == (decision, start):  # continued by another policy version
            start = answer[1]
        elif answer is not None:
            yield answer
        answer = decision, start, end
    if answer is not None:
        yield answer


def emission_views(segments: Sequence[Segment]) -> list[EmissionView]:
    """Return a view of each decision of an episode, in order; skip decisions without sampled tokens.

    Source: 3-context-editing-tool-loop.md ("List of prompt_ids snapshots before each generation").
    """
    return [
        EmissionView(t + 1, number, ids[:start], ids[start:end], start, end)
        for number, segment in enumerate(segments)
        for ids in [tuple(segment.token_ids.tolist())]
        for t, start, end in assistant_turn_boundaries(segment)
    ]
