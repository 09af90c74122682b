"""Metrics of the probability ratio in policy losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from trainer_backend.core.kl import k3
from trainer_backend.core.losses import RangeKeys, log_ratio, weighted_sum
from trainer_backend.core.metric import Metric, Row

if TYPE_CHECKING:
    from torch import Tensor


METRICS = (
    Row(
        Metric("loss/ratio_mean", "probability ratio of the update, mean over tokens by their weights",
               "ratio", "mean", band=("loss/ratio_min", "loss/ratio_max")),
        Metric("loss/ratio_min", "the least"),
        Metric("loss/ratio_max", "the largest"),
    ),
    Row(
        Metric("loss/clip_low_share", "share of tokens clipped below", "clip", "lower"),
        Metric("loss/clip_high_share", "share of tokens clipped above", "clip", "upper"),
        note="`sapo` and `policy_gradient` clip none: shares beyond the range",
    ),
)  # fmt: skip


def clip_metrics(
    logprobs: Tensor, proximal_logprobs: Tensor, advantages: Tensor, weights: Tensor, keys: RangeKeys
) -> dict[str, float]:
    """Compute the shares of clipped tokens, and mean, minimum and maximum of the probability ratio.

    A token counts as clipped if its ratio is below 1 - clip_low and its advantage is negative, or if its
    ratio is above 1 + clip_high and its advantage is positive. Tokens of weight 0 are ignored; if all weights
    are 0, minimum and maximum are absent.

    The arguments are those of `losses.clipped_policy_loss`. Shares and mean are weighted sums, so that
    `merge_metrics` can add those of a step's micro-batches.
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
    """Estimate KL(proximal || policy) at each token, [N], in nats, by k3; 0 where the weight is 0.

    No estimate is negative, so a sum over some tokens never exceeds the sum over all. Do not pass a
    result of `losses.level_ratios` as `logprobs`, because opposite changes cancel in the mean over a unit.
    """
    return k3(-log_ratio(logprobs, proximal_logprobs, weights).detach()).clamp(min=0.0)


def merge_metrics(parts: Iterable[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of a step's micro-batches: minimum of `*_min`, maximum of `*_max`, else the sum."""
    return _merge(parts, sum)


def mean_metrics(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the metrics of an iteration's steps: minimum of `*_min`, maximum of `*_max`, else the mean."""
    return _merge(parts, lambda values: sum(values) / len(values))


def _merge(parts: Iterable[dict[str, float]], others: Callable[[Sequence[float]], float]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for part in parts:
        for name, value in part.items():
            values.setdefault(name, []).append(value)
    by_ending = {"_min": min, "_max": max}
    return {name: by_ending.get(name[-4:], others)(several) for name, several in values.items()}
