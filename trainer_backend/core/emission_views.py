"""The prompt and the place of each answer: emission_views, assistant_turn_boundaries. Pure.

Source 3 has these names, and takes snapshots of both while an episode runs. Here they follow from
core.segments, which hold every sampled token on the exact view that it was sampled from.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trainer_backend.core.segments import Segment


@dataclass(frozen=True, slots=True)
class EmissionView:
    """The view of one decision, of this turn, which counts from 1."""

    turn: int
    segment: int
    """Which segment trains it, from 0."""
    prompt_ids: tuple[int, ...]
    """[start] all ids that the policy saw."""
    answer_ids: tuple[int, ...]
    """[end - start] what it sampled."""
    start: int
    end: int
    """Where the answer stands in the segment's ids, from `start`; the end is not included."""


def assistant_turn_boundaries(segment: Segment) -> Iterator[tuple[int, int, int]]:
    """(decision t, start, end) of each answer that the segment trains, in order; the end is not included.

    Source: 3-context-editing-tool-loop.md ("List of (start_idx, end_idx) tuples").
    """
    answer: tuple[int, int, int] | None = None
    for start, end, decision, _, _ in segment.spans.tolist():
        if answer is not None and answer[::2] == (decision, start):  # another version continued it
            start = answer[1]
        elif answer is not None:
            yield answer
        answer = decision, start, end
    if answer is not None:
        yield answer


def emission_views(segments: Sequence[Segment]) -> list[EmissionView]:
    """The views of an episode's decisions, in order; one that sampled nothing has none.

    Source: 3-context-editing-tool-loop.md ("List of prompt_ids snapshots before each generation").
    """
    return [
        EmissionView(t + 1, number, ids[:start], ids[start:end], start, end)
        for number, segment in enumerate(segments)
        for ids in [tuple(segment.token_ids.tolist())]
        for t, start, end in assistant_turn_boundaries(segment)
    ]
