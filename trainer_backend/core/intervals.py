"""Intervals of rates, and the Crafter score with its interval. Pure."""

import math
from collections.abc import Mapping, Sequence

from trainer_backend.core.statistics import Z_975, Interval, t_quantile_975


def crafter_score_interval(counts: Sequence[Mapping[str, int]]) -> Interval:
    """The Crafter score of independent episodes, in percent, with a 95 % interval.

        score = exp(m) - 1,   m = mean_i ln(1 + 100 p_i),   p_i: share of episodes that unlocked i

    The interval is that of m, by the delta method: an episode e with x_ei = 1 where it unlocked i moves m by
    mean_i 100 (x_ei - p_i) / (1 + 100 p_i), and these are averaged over episodes as any mean is. What no
    episode unlocked, or every one did, counts as certain, so the interval is narrow where episodes are few.

    Args:
        counts: counter of every achievement at the end of each episode; a missing name counts 0.

    Returns:
        The score in percent; the bounds are None for a single episode.

    Raises:
        ValueError: no episodes, or no achievements.

    Source: the score is that of Hafner 2021, Benchmarking the Spectrum of Agent Capabilities, section 3.
    """
    names = sorted({name for episode in counts for name in episode})
    if not names:
        raise ValueError("a score needs episodes, and achievements in them")
    total = len(counts)
    rates = [sum(episode.get(name, 0) > 0 for episode in counts) / total for name in names]
    m = math.fsum(math.log1p(100 * rate) for rate in rates) / len(names)
    if total == 1:
        return Interval(math.expm1(m), None, None, 1)
    shifts = [
        math.fsum(
            100 * ((episode.get(name, 0) > 0) - rate) / (1 + 100 * rate)
            for name, rate in zip(names, rates, strict=True)
        )
        / len(names)
        for episode in counts
    ]
    variance = math.fsum(shift**2 for shift in shifts) / (total - 1)
    half = t_quantile_975(total - 1) * math.sqrt(variance / total)
    return Interval(math.expm1(m), max(math.expm1(m - half), 0.0), min(math.expm1(m + half), 100.0), total)


def wilson_interval(successes: int, count: int) -> Interval:
    """A rate with its 95 % Wilson score interval.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    It stays inside [0, 1], and 0 of n or n of n still has a width, where the normal approximation has none.

    Args:
        successes: how many of `count` succeeded.
        count: independent trials, at least 1.

    Raises:
        ValueError: no trials, or successes outside 0 .. count.

    Source: Wilson, JASA 22 (1927), p. 209.
    """
    if count < 1:
        raise ValueError("a rate needs at least one trial")
    if not 0 <= successes <= count:
        raise ValueError(f"successes must lie in 0 .. {count}, got {successes}")
    rate = successes / count
    widening = 1 + Z_975**2 / count
    centre = (rate + Z_975**2 / (2 * count)) / widening
    half = Z_975 / widening * math.sqrt(rate * (1 - rate) / count + Z_975**2 / (4 * count**2))
    return Interval(rate, max(centre - half, 0.0), min(centre + half, 1.0), count)
