"""Whose ratio a token has: its own, its decision's or its episode's (`ratio_level`, DESIGN.md 4.8)."""

from collections.abc import Callable, Hashable, Sequence

from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import Segment

_OF: dict[RatioLevel, Callable[[Segment, int], Hashable]] = {
    "token": lambda segment, position: (id(segment), position),
    "decision": lambda segment, position: (segment.rollout_id, segment.decision[position]),
    "episode": lambda segment, position: segment.rollout_id,
}


def ratio_units(segments: Sequence[Segment], level: RatioLevel) -> list[list[int]]:
    """For each segment, [N] the number of each sampled token's unit, from 0 in order of appearance.

    A decision lies in one segment; an episode may lie in several.
    """
    numbers: dict[Hashable, int] = {}
    unit = _OF[level]
    return [
        [numbers.setdefault(unit(segment, position), len(numbers)) for position in segment.sampled_positions]
        for segment in segments
    ]
