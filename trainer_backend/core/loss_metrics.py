"""What to watch while a clipped loss trains."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trainer_backend.core.kl import k3
from trainer_backend.core.losses import RangeKeys, log_ratio, weighted_sum

if TYPE_CHECKING:
    from torch import Tensor


def clip_metrics(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: RangeKeys
) -> dict[str, float]:
    """How far the policy has moved from the proximal one, over tokens of weight above 0.

        loss/clip_low_share    weighted share of tokens held at 1 - clip_low (negative advantage)
        loss/clip_high_share   ... at 1 + clip_high (positive advantage)
        loss/ratio_mean        weighted mean of the ratio
        loss/ratio_min, _max   its bounds; absent where no token has a weight, as an aggregation may decide

    Arguments as in `losses.clipped_policy_loss`. Shares and means are sums over the weights given, so
    those of the cuts of a step add up to the step's (`merge_metrics`).
    """
    ratio = log_ratio(logprobs, proximal_logprobs, weights).detach().exp()
    held_low = (ratio < 1.0 - keys.clip_low) & (advantages < 0)
    held_high = (ratio > 1.0 + keys.clip_high) & (advantages > 0)
    counted = ratio[weights != 0]
    bounds = (
        {"loss/ratio_min": float(counted.min()), "loss/ratio_max": float(counted.max())}
        if len(counted)
        else {}
    )
    return {
        "loss/clip_low_share": float(weighted_sum(held_low.to(ratio.dtype), weights)),
        "loss/clip_high_share": float(weighted_sum(held_high.to(ratio.dtype), weights)),
        "loss/ratio_mean": float(weighted_sum(ratio, weights)),
        **bounds,
    }


def token_kl(logprobs: Tensor, proximal_logprobs: Tensor, weights: Tensor) -> Tensor:
    """[N] KL(proximal || policy) at each token in nats, by k3; 0 where the weight is 0.

    Never below 0, not even by rounding, so a sum over some tokens never exceeds that over all. Takes the
    tokens' own log-probs, not those of `losses.level_ratios`: in the mean of a unit, opposite moves cancel.
    """
    return k3(-log_ratio(logprobs, proximal_logprobs, weights).detach()).clamp(min=0.0)


def merge_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's cuts: `_min` and `_max` by name, everything else adds up."""
    return _merge(parts, sum)


def mean_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of an iteration from those of its steps, each over the steps that have it: `_min` and `_max` by
    name, of everything else the mean."""
    return _merge(parts, lambda values: sum(values) / len(values))


def _merge(parts: Iterable[dict[str, float]], others: Callable[[Sequence[float]], float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    by_ending = {"_min": min, "_max": max}
    return {name: by_ending.get(name[-4:], others)(several) for name, several in values.items()}
