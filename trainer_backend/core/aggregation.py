"""Weights of sampled tokens in an optimizer step: loss aggregation, and shared ratios (DESIGN.md 4.8).

Weights are computed before segments are packed and cut. So the loss, sum(weight * surrogate), does not depend
on order, packing or the number of devices.
"""

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from trainer_backend.core.keys import Table
from trainer_backend.core.losses import RatioLevel
from trainer_backend.core.segments import Segment
from trainer_backend.errors import BatchError

# (segments, keys of the aggregation) -> for each segment, the [N] weights of its sampled tokens.
Aggregation = Callable[[Sequence[Segment], Any], list[NDArray[Any]]]
WeighedOver = Literal["step", "iteration", "plan"]


class ConstantKeys(Table):
    """Keys of aggregations whose denominator is planned, not sampled."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """constant: number of sampled tokens that the denominator counts for each of the planned episodes
    (rollout.episodes_per_batch); absent: the most that an episode may sample"""


@dataclass(frozen=True, slots=True)
class AggregationPlug:
    """An aggregation that a job can name."""

    weights: Aggregation
    over: WeighedOver = "step"
    """The segments that `weights` gets: those of one "step", or of the whole "iteration", where an episode's
    segments may lie in several steps. Weights over the iteration are multiplied by the number of steps of
    a pass, so that a step weighs about 1. Over the "plan", a step's weights are divided by the number of
    planned tokens, which does not depend on samples."""
    keys: type[Table] = Table
    """The keys that it reads from `[training]`, or from `[training.NAME]` if [training] lacks them."""

    @property
    def is_biased(self) -> bool:
        """Return whether the denominator depends on samples, which biases the gradient."""
        return self.over != "plan"


def token_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Weigh all sampled tokens of the step equally.

        w = 1 / (sampled tokens of the step)

    Biased: the denominator depends on the sampled lengths, so an answer counts less in a step with long
    answers. The bias falls as a step holds more episodes (tests/trainer_backend/core/test_unbiased.py).

    Takes all segments of one optimizer step. Returns for each segment the [N] weights of its sampled tokens;
    all weights sum to 1. Raises BatchError if no token was sampled.

    Source: Yu et al., DAPO, arXiv:2503.14476, section 3.3 (token-level loss); DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: 0)


def decision_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Weigh all decisions of the step equally, whatever their length.

        w = 1 / (decisions of the step * sampled tokens of the decision)

    Biased at any number of episodes: a token counts less in a long answer than in a short one, which shortens
    right answers and lengthens wrong ones.

    Arguments, result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: (segment.rollout_id, t))


def episode_equal(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Weigh all episodes of the iteration equally, whatever their number of segments and steps.

        w = 1 / (episodes of the iteration * sampled tokens of the episode)

    Biased like `decision_mean`, by the lengths of episodes. Takes all segments of the iteration: weighed
    step by step, an episode with segments in S steps would count up to S times.

    Result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: segment.rollout_id)


def constant(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Weigh every sampled token 1; the caller divides by the planned tokens.

        w = 1 / (episodes planned for the iteration * training.constant_tokens)

    The denominator does not depend on samples, so an unbiased advantage gives an unbiased gradient, up to
    scale. Planned episodes that failed or were skipped as flat count in the denominator. Arguments, result
    and errors as in `token_mean`.

    Source: Liu et al., Dr. GRPO, arXiv:2503.20783, section 3.2, whose constant is the budget of a generation;
    DESIGN.md 4.6.
    """
    refuse_none(segments)
    return [np.ones(len(segment.logprobs)) for segment in segments]


def refuse_none(segments: Sequence[Segment]) -> None:
    """Raise BatchError if no token was sampled."""
    if not any(len(segment.logprobs) for segment in segments):
        raise BatchError("no sampled token in the optimizer step; there is nothing to train on")


def _weights(segments: Sequence[Segment], unit: Callable[[Segment, int], Hashable]) -> list[NDArray[Any]]:
    """Weigh all units equally, and all tokens within a unit."""
    refuse_none(segments)
    spans = [
        [(unit(segment, span[2]), span[1] - span[0]) for span in segment.spans.tolist()]
        for segment in segments
    ]
    tokens = Counter[Hashable]()
    for name, count in chain.from_iterable(spans):
        tokens[name] += count
    return [
        np.repeat([1.0 / (len(tokens) * tokens[name]) for name, _ in row], [count for _, count in row])
        for row in spans
    ]


def number_units(segments: Sequence[Segment], levels: Sequence[RatioLevel]) -> list[NDArray[Any]]:
    """Return for each segment the [N] numbers of its tokens' units, from 0 in order of appearance.

    A unit is a token, a decision or an episode: the level of the segment in `levels`. `segments` must contain
    every unit completely. A decision lies in one segment; an episode may lie in several, all of one level.
    """
    numbers: dict[Hashable, int] = {}
    rows, count = [], 0
    for segment, level in zip(segments, levels, strict=True):
        if level == "token":
            rows.append(np.arange(count, count + len(segment.logprobs)))
            count += len(segment.logprobs)
            continue
        spans = []
        for t in segment.spans["decision"].tolist():
            name = segment.rollout_id if level == "episode" else (segment.rollout_id, t)
            if name not in numbers:
                numbers[name], count = count, count + 1
            spans.append(numbers[name])
        rows.append(np.repeat(spans, segment.spans["end"] - segment.spans["start"]))
    return rows


def without_keys(weights: Callable[[Sequence[Segment]], list[NDArray[Any]]]) -> Aggregation:
    """Wrap an aggregation that reads no keys."""
    return lambda segments, keys: weights(segments)


AGGREGATIONS: dict[str, AggregationPlug] = {
    "token_mean": AggregationPlug(without_keys(token_mean)),
    "decision_mean": AggregationPlug(without_keys(decision_mean)),
    "episode_equal": AggregationPlug(without_keys(episode_equal), over="iteration"),
    "constant": AggregationPlug(without_keys(constant), over="plan", keys=ConstantKeys),
}
