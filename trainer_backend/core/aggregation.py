"""Loss aggregation: weights of sampled tokens in the loss, and groups of tokens that share a ratio.

Weights are computed before segments are packed into rows and divided into micro-batches. Therefore the loss,
sum(weight * surrogate), does not depend on the order of segments, on packing or on the number of devices
(DESIGN.md 4.8).
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
    """Keys of aggregations whose denominator is fixed before sampling."""

    constant_tokens: int | None = Field(default=None, ge=1)
    """constant: the denominator is this number of tokens times the number of planned episodes
    (rollout.episodes_per_batch); absent: the largest number of tokens that an episode may sample"""


@dataclass(frozen=True, slots=True)
class AggregationPlug:
    """A rule that gives each sampled token its weight in the loss. A job selects it by name."""

    weights: Aggregation
    over: WeighedOver = "step"
    """Which segments `weights` gets, and how its result is scaled. "step": the segments of one optimizer
    step. "iteration": all segments of the iteration, because an episode's segments may lie in several steps;
    the weights are then multiplied by the number of steps of a pass, so that the weights of a step sum to
    about 1. "plan": the segments of one step; the weights are then divided by the number of planned tokens,
    which does not depend on samples."""
    keys: type[Table] = Table
    """Class of the job keys that the rule reads. Keys that the table [training] does not define are in
    [training.NAME]."""

    @property
    def is_biased(self) -> bool:
        """Whether the denominator depends on samples, which biases the gradient."""
        return self.over != "plan"


def token_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Give all sampled tokens of the step the same weight.

        w = 1 / (sampled tokens of the step)

    The gradient is biased, because the denominator depends on the sampled lengths: an answer counts less in a
    step with long answers. The bias becomes smaller if a step contains more episodes
    (tests/trainer_backend/core/test_unbiased.py).

    Takes all segments of one optimizer step. Returns, for each segment, the [N] weights of its sampled
    tokens. The weights of all segments sum to 1. Raises BatchError if no token was sampled.

    Source: Yu et al., DAPO, arXiv:2503.14476, section 3.3 (token-level loss); DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: 0)


def decision_mean(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Give all decisions of the step the same total weight, whatever their length.

        w = 1 / (decisions of the step * sampled tokens of the decision)

    The gradient is biased for any number of episodes: a token counts less in a long answer than in a short
    answer, so training shortens right answers and lengthens wrong answers.

    Arguments, result and errors are those of `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: (segment.rollout_id, t))


def episode_equal(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Give all episodes of the iteration the same total weight, whatever their number of segments and steps.

        w = 1 / (episodes of the iteration * sampled tokens of the episode)

    The gradient is biased as in `decision_mean`, here by the lengths of episodes. Takes all segments of the
    iteration. If each step were weighted separately, an episode with segments in several steps would count
    several times.

    Result and errors are those of `token_mean`. Source: DESIGN.md 4.8.
    """
    return _weights(segments, lambda segment, t: segment.rollout_id)


def constant(segments: Sequence[Segment]) -> list[NDArray[Any]]:
    """Give every sampled token the weight 1, which the caller divides by the number of planned tokens.

        w = 1 / (episodes planned for the iteration * training.constant_tokens)

    The denominator does not depend on samples, so unbiased advantages give an unbiased gradient, up to a
    constant factor. A planned episode counts in the denominator even if it failed, or if its group was
    skipped as flat. Arguments, result and errors are those of `token_mean`.

    Source: Liu et al., Dr. GRPO, arXiv:2503.20783, section 3.2, whose constant is the token budget of one
    generation; DESIGN.md 4.6.
    """
    refuse_none(segments)
    return [np.ones(len(segment.logprobs)) for segment in segments]


def refuse_none(segments: Sequence[Segment]) -> None:
    """Raise BatchError if no token was sampled."""
    if not any(len(segment.logprobs) for segment in segments):
        raise BatchError("no sampled token in the optimizer step; there is nothing to train on")


def _weights(segments: Sequence[Segment], unit: Callable[[Segment, int], Hashable]) -> list[NDArray[Any]]:
    """Give all units the same total weight, and all tokens within a unit the same weight.

    `unit` maps a segment and the index t of a decision to the unit of that decision's tokens.
    """
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
    """Return, for each segment, the [N] unit numbers of its sampled tokens, from 0 in order of appearance.

    All tokens of a unit share one probability ratio. A unit is a token, a decision or an episode, as `levels`
    says for each segment. `segments` must contain every unit completely. A decision lies in one segment. An
    episode may lie in several segments, which must have the same level.
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
    """Wrap an aggregation that reads no keys, so that it accepts keys and ignores them."""
    return lambda segments, keys: weights(segments)


AGGREGATIONS: dict[str, AggregationPlug] = {
    "token_mean": AggregationPlug(without_keys(token_mean)),
    "decision_mean": AggregationPlug(without_keys(decision_mean)),
    "episode_equal": AggregationPlug(without_keys(episode_equal), over="iteration"),
    "constant": AggregationPlug(without_keys(constant), over="plan", keys=ConstantKeys),
}
