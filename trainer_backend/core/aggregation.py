"""Weights of sampled tokens in an optimizer step: loss aggregation, and shared ratios (DESIGN.md 4.8).

Weights are made before segments are packed and cut. So the loss is sum(weight * surrogate), whatever the
order, the packing or the number of devices.
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

# Of segments and the keys of the plug.
Aggregation = Callable[[Sequence[Segment], Any], list[NDArray[Any]]]
WeighedOver = Literal["step", "iteration", "plan"]


class ConstantKeys(Table):
    """Of aggregations over the plan."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """constant: sampled tokens that each of rollout.episodes_per_batch counts as in the denominator; absent:
    the most that an episode may sample"""


@dataclass(frozen=True, slots=True)
class AggregationPlug:
    """An aggregation on the plug board."""

    weights: Aggregation
    over: WeighedOver = "step"
    """Whose segments `weights` takes. A decision lies in one step; an episode may lie in several, so its
    weights need the whole "iteration", and are multiplied by the number of steps in a pass, so that a step
    weighs about 1. Weights over the "plan" are divided by what was planned, which does not depend on samples;
    those of a pass's steps add up to those of the whole."""
    keys: type[Table] = Table
    """What it reads of `[training]`; keys that [training] lacks stand in `[training.NAME]`."""

    @property
    def is_biased(self) -> bool:
        """Whether the denominator is sampled, which turns the expected gradient."""
        return self.over != "plan"


def token_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Every sampled token of the step counts the same.

        w = 1 / (sampled tokens of the step)

    A bias: the denominator depends on the sampled lengths, so an answer counts less in a step with long ones.
    It fades as a step holds more episodes (tests/trainer_backend/core/test_unbiased.py).

    Takes all segments of one optimizer step and returns for each the [N] weights of its sampled tokens, which
    sum to 1 over all segments. Raises BatchError where no token was sampled.

    Source: Yu et al., DAPO, arXiv:2503.14476, section 3.3 (token-level loss); DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: 0)


def decision_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Every decision of the step counts the same, whatever its length.

        w = 1 / (decisions of the step * sampled tokens of the decision)

    A bias at any number of episodes: a token counts less in a long answer than in a short one, so right
    answers are pulled short, and wrong ones long.

    Arguments, result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: (segment.rollout_id, t))


def episode_equal(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Every episode of the iteration counts the same, in however many segments and steps it lies.

        w = 1 / (episodes of the iteration * sampled tokens of the episode)

    It has the bias of `decision_mean`, by the tokens of whole episodes. Takes all segments of the iteration:
    given one step's, an episode whose segments lie in S steps would count up to S times.

    Result and errors as in `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: segment.rollout_id)


def constant(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Every sampled token counts 1, to be divided by what was planned.

        w = 1 / (episodes planned for the iteration * training.constant_tokens)

    The denominator does not depend on samples, so an unbiased advantage gives an unbiased gradient, up to
    that scale. Planned episodes that failed or were skipped as flat still count in the denominator.
    Arguments, result and errors as in `token_mean`.

    Source: Liu et al., Dr. GRPO, arXiv:2503.20783, section 3.2, whose constant is the budget of a generation;
    DESIGN.md 4.6.
    """
    refuse_none(segments)
    return [np.ones(len(segment.logprobs)) for segment in segments]


def refuse_none(segments: Sequence[Segment]) -> None:
    """Raise BatchError where no token was sampled."""
    if not any(len(segment.logprobs) for segment in segments):
        raise BatchError("no sampled token in the optimizer step; there is nothing to train on")


def _weights(segments: Sequence[Segment], unit: Callable[[Segment, int], Hashable]) -> list[NDArray[Any]]:
    """Each unit weighs the same, and so does each token within it."""
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
    """Number the units of sampled tokens, from 0 in order of appearance: [N] for each segment.

    `segments` must hold every unit whole, and `levels` has the level of each. A decision lies in one segment;
    an episode may lie in several, all of one level.
    """
    numbers: dict[Hashable, int] = {}
    rows, count = [], 0
    for segment, level in zip(segments, levels, strict=True):
        if level == "token":
            rows.append(np.arange(count, count + len(segment.logprobs)))
            count += len(segment.logprobs)
            continue
        of_spans = []
        for t in segment.spans["decision"].tolist():
            name = segment.rollout_id if level == "episode" else (segment.rollout_id, t)
            if name not in numbers:
                numbers[name], count = count, count + 1
            of_spans.append(numbers[name])
        rows.append(np.repeat(of_spans, segment.spans["end"] - segment.spans["start"]))
    return rows


def without_keys(weights: Callable[[Sequence[Segment]], list[NDArray[Any]]]) -> Aggregation:
    """An aggregation that goes by the segments alone."""
    return lambda segments, keys: weights(segments)


AGGREGATIONS: dict[str, AggregationPlug] = {
    "token_mean": AggregationPlug(without_keys(token_mean)),
    "decision_mean": AggregationPlug(without_keys(decision_mean)),
    "episode_equal": AggregationPlug(without_keys(episode_equal), over="iteration"),
    "constant": AggregationPlug(without_keys(constant), over="plan", keys=ConstantKeys),
}
