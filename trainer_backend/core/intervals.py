"""Intervals of rates, and the Crafter score with its interval. Pure."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from trainer_backend.core.statistics import (
    Z_975,
    Interval,
    bounded,
    by_world,
    mean_interval,
    t_quantile_975,
)


def achievement_shares(counts: Sequence[Mapping[str, int]], worlds: Sequence[str]) -> dict[str, list[float]]:
    """[W] share of each world's episodes that unlocked an achievement, by its name in alphabetical order.

    Args:
        counts: counter of every achievement at the end of each episode; a missing name counts 0.
        worlds: of each episode.
    """
    return {
        name: by_world([float(item.get(name, 0) > 0) for item in counts], worlds, fmean)
        for name in sorted({name for episode in counts for name in episode})
    }


def crafter_score_interval(counts: Sequence[Mapping[str, int]], worlds: Sequence[str]) -> Interval:
    """The Crafter score of episodes, in percent, with a 95 % interval over worlds.

        score = exp(m) - 1,   m = mean_i ln(1 + 100 p_i),   p_i: mean over worlds of the share p_wi of a
                                                            world's episodes that unlocked i

    The interval is that of m, by the delta method: a world moves m by
    mean_i 100 (p_wi - p_i) / (1 + 100 p_i), and these are averaged as any mean of worlds is. What no episode
    unlocked, or every one did, counts as certain, so the interval is narrow where worlds are few.

    Args:
        counts: counter of every achievement at the end of each episode; a missing name counts 0.
        worlds: of each episode.

    Returns:
        The score in percent; the bounds are None for a single world.

    Raises:
        ValueError: no episodes, or no achievements.

    Source: the score is that of Hafner 2021, Benchmarking the Spectrum of Agent Capabilities, section 3.
    """
    shares_NW = list(achievement_shares(counts, worlds).values())
    if not shares_NW:
        raise ValueError("a score needs episodes, and achievements in them")
    rates = [fmean(shares_W) for shares_W in shares_NW]
    m = fmean(math.log1p(100 * rate) for rate in rates)
    shifts = [
        fmean(100 * (share - rate) / (1 + 100 * rate) for share, rate in zip(shares, rates, strict=True))
        for shares in zip(*shares_NW, strict=True)
    ]
    shift = mean_interval(shifts)
    if shift.low is None or shift.high is None:
        return Interval(math.expm1(m), None, None, 1)
    score = Interval(math.expm1(m), math.expm1(m + shift.low), math.expm1(m + shift.high), shift.count)
    return bounded(score, 0.0, 100.0)


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
    return _wilson(successes / count, count)


def nested_rate_interval(shares: Sequence[float], episodes: int) -> Interval:
    """The mean of rates of worlds that were played several times each, with Wilson's interval.

    Episodes of a world are not independent, so Wilson's count n is the effective one, between 1 and E:

        n = min(p (1 - p) / v, E) * (t_{E-1} / t_{W-1})^2,   v = sum_w (p_w - p)^2 / (W (W - 1))

    of W worlds with shares p_w, their mean p, and E episodes; t is Student's 97.5 % quantile. Where p is 0 or
    1, v tells nothing, and W stands for the minimum. One episode a world: `wilson_interval`.

    Args:
        shares: [W] share of successes of each world.
        episodes: of all worlds together, at least W.

    Raises:
        ValueError: no worlds.

    Source: Korn and Graubard, Survey Methodology 24 (1998), p. 193, with Wilson's interval for theirs.
    """
    worlds = len(shares)
    if worlds == 0:
        raise ValueError("a rate needs at least one world")
    rate = min(fmean(shares), 1.0)
    interval = _wilson(rate, _effective_count(shares, rate, episodes))
    return Interval(interval.mean, interval.low, interval.high, worlds)


def _effective_count(shares: Sequence[float], rate: float, episodes: int) -> float:
    worlds = len(shares)
    if worlds == episodes or worlds == 1:
        return worlds  # independent plays, or no knowledge at all of how worlds differ
    variance = math.fsum((share - rate) ** 2 for share in shares) / (worlds * (worlds - 1))
    count: float = worlds if rate in (0, 1) else episodes
    if variance > 0:
        count = min(rate * (1 - rate) / variance, episodes)
    return max(count * (t_quantile_975(episodes - 1) / t_quantile_975(worlds - 1)) ** 2, 1.0)


def _wilson(rate: float, count: float) -> Interval:
    widening = 1 + Z_975**2 / count
    centre = (rate + Z_975**2 / (2 * count)) / widening
    half = Z_975 / widening * math.sqrt(rate * (1 - rate) / count + Z_975**2 / (4 * count**2))
    return Interval(rate, max(centre - half, 0.0), min(centre + half, 1.0), int(count))
