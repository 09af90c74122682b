"""The prompt and the position of each answer: emission_views, assistant_turn_boundaries. Pure.

Source 3 records both while an episode runs. Here they are derived from core.segments, which hold every
sampled token after the exact prompt from which it was sampled.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer_backend.core.segments import Segment


@dataclass(frozen=True, slots=True)
class EmissionView:
    turn: int
    """From 1."""
    segment: int
    """Index of the segment that trains the decision."""
    prompt_ids: tuple[int, ...]
    """The prompt: the [start] ids before the answer."""
    answer_ids: tuple[int, ...]
    """The answer: the [end - start] sampled ids."""
    start: int
    end: int
    """Position of the answer in the segment's ids; the end is not included."""


def assistant_turn_boundaries(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """Yield (decision t, start, end) of each answer that the segment trains; the end is not included.

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
    """Return the views of an episode's decisions in order, without decisions that sampled no token.

    Source: 3-context-editing-tool-loop.md ("List of prompt_ids snapshots before each generation").
    """
    return [
        EmissionView(t + 1, number, ids[:start], ids[start:end], start, end)
        for number, segment in enumerate(segments)
        for ids in [tuple(segment.token_ids.tolist())]
        for t, start, end in assistant_turn_boundaries(segment)
    ]
