"""Whose ratio, or behaviour weight, a token has: its own, its decision's or its episode's (DESIGN.md 4.8)."""

from collections.abc import Callable, Hashable, Sequence

from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import Segment

_OF: dict[RatioLevel, Callable[[Segment, int], Hashable]] = {
    "token": lambda segment, position: (id(segment), position),
    "decision": lambda segment, position: (segment.rollout_id, segment.decision[position]),
    "episode": lambda segment, position: segment.rollout_id,
}


def units_of(segments: Sequence[Segment], levels: Sequence[RatioLevel]) -> list[list[int]]:
    """For each segment, [N] the number of each sampled token's unit, from 0 in order of appearance.

    A decision lies in one segment; an episode may lie in several, all of one level.

    Args:
        segments: all of what units may lie in.
        levels: that of each segment.
    """
    numbers: dict[Hashable, int] = {}
    return [
        [
            numbers.setdefault(_OF[level](segment, position), len(numbers))
            for position in segment.sampled_positions
        ]
        for segment, level in zip(segments, levels, strict=True)
    ]
