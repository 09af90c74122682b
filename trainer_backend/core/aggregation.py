"""How much each sampled token counts in an optimizer step: loss aggregation by name (DESIGN.md 4.8).

Weights are made once for all segments of a step, before they are packed and cut, and sum to 1. So the
loss is sum(weight * surrogate), whatever the order, the packing or the number of devices.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from trainer_backend.core.errors import BatchError
from trainer_backend.core.segments import CONTEXT, Segment

Aggregation = Callable[[Sequence[Segment]], list[list[float]]]


def token_mean(segments: Sequence[Segment]) -> list[list[float]]:
    """Every sampled token of the step counts the same.

        w = 1 / (sampled tokens of the step)

    Args:
        segments: all segments of one optimizer step.

    Returns:
        For each segment, [N] the weight of each of its sampled tokens; all together sum to 1.

    Raises:
        BatchError: no token was sampled.

    Source: Yu et al., DAPO, arXiv:2503.14476, section 3.3 (token-level loss); DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: 0)


def decision_mean(segments: Sequence[Segment]) -> list[list[float]]:
    """Every decision of the step counts the same, whatever its length.

        w = 1 / (decisions of the step * sampled tokens of the decision)

    Arguments, result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: (segment.rollout_id, t))


def episode_equal(segments: Sequence[Segment]) -> list[list[float]]:
    """Every episode of the step counts the same, in however many segments it lies.

        w = 1 / (episodes of the step * sampled tokens of the episode)

    Arguments, result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: segment.rollout_id)


def _weights(segments: Sequence[Segment], unit: Callable[[Segment, int], object]) -> list[list[float]]:
    """Each unit weighs the same, and so does each token within it."""
    units = [[unit(segment, t) for t in segment.decision if t != CONTEXT] for segment in segments]
    tokens = Counter(name for row in units for name in row)
    if not tokens:
        raise BatchError("no sampled token in the optimizer step; there is nothing to train on")
    return [[1.0 / (len(tokens) * tokens[name]) for name in row] for row in units]
