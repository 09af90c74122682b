"""Confidence intervals of rates, and of the Crafter score. Pure functions.

A *world* is one start of the environment, from one seed; it may be played in several episodes.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev

from trainer_backend.core.agreement import centred
from trainer_backend.core.statistics import Z_975, Interval, bounded, t_quantile_975


def achievement_shares(counts: Sequence[Mapping[str, int]], worlds: Sequence[str]) -> dict[str, list[float]]:
    """Return for each achievement, sorted by name, the share of episodes that unlocked it in each world, [W].

    `counts` contains the achievement counters at the end of each episode; a missing name counts as 0.
    `worlds` contains the world of each episode.
    """
    plays: defaultdict[str, list[Mapping[str, int]]] = defaultdict(list)
    for world, item in zip(worlds, counts, strict=True):
        plays[world].append(item)
    return {
        name: [sum(item.get(name, 0) > 0 for item in episodes) / len(episodes) for episodes in plays.values()]
        for name in sorted({name for episode in counts for name in episode})
    }


def crafter_score_interval(counts: Sequence[Mapping[str, int]], worlds: Sequence[str]) -> Interval:
    """Compute the Crafter score of episodes, in percent, with a 95 % interval over worlds.

        score = exp(m) - 1,   m = mean_i f(p_i),   f(p) = ln(1 + 100 p),   p_i: mean over worlds of the share
                                                   s_wi of a world's episodes that unlocked i, i = 1 .. N

    The interval of m is computed from the interval (l_i, u_i) of each p_i (`nested_rate_interval`):

        low  = m - d(a) / N,         a_i = f(p_i) - f(l_i),   d(a)^2 = sum_ij c_ij a_i a_j
        high = m + (d(b) + B) / N,   b_i = f(u_i) - f(p_i)

    c_ij is (1 - 1/W) times the correlation of s_wi and s_wj over the W worlds, or 0 if either does not vary;
    c_ii is 1. B >= 0 is the jackknife estimate of how much N m is too low on average: if achievements are
    rare, m is too low because f is concave. In d(b), the term `_unseen_distance` replaces the terms of all
    achievements that no episode unlocked.

    bench/score_coverage.py of commit 4d960597 measures how often the interval contains the true score. The
    upper bound is high if many achievements were never unlocked, because 100 episodes do not distinguish a
    rate of 0 from 1 %. The interval is too narrow for fewer than ten worlds, or if rare achievements are
    nearly always unlocked in the same worlds.

    Args:
        counts: counter of every achievement at the end of each episode; a missing name counts as 0.
        worlds: world of each episode.

    Returns:
        The score in percent; the bounds are None for a single world.

    Raises:
        ValueError: if there are no episodes or no achievements.

    Source: score: Hafner 2021, Benchmarking the Spectrum of Agent Capabilities, section 3; interval of a sum:
    Zou and Donner, Statistics in Medicine 27 (2008), p. 1693, to which the correlations are added here.
    """
    shares_NW = list(achievement_shares(counts, worlds).values())
    if not shares_NW:
        raise ValueError("a score needs episodes, and achievements in them")
    total, worlds_played = len(shares_NW), len(shares_NW[0])
    m = fmean(_log_percent(fmean(shares_W)) for shares_W in shares_NW)
    score = min(math.expm1(m), 100.0)  # rounding may exceed 100
    if worlds_played == 1:
        return Interval(score, None, None, 1)
    down_N, up_N = zip(*(_distances(shares_W, len(counts)) for shares_W in shares_NW), strict=True)
    scaled_NW = [_standardise(shares_W) for shares_W in shares_NW]
    seen_up_N = [up if any(shares_W) else 0.0 for up, shares_W in zip(up_N, shares_NW, strict=True)]
    above = math.hypot(_sum_distance(scaled_NW, seen_up_N), _unseen_distance(shares_NW, len(counts)))
    bias = math.fsum(_jackknife_bias(shares_W) for shares_W in shares_NW)
    low, high = m - _sum_distance(scaled_NW, down_N) / total, m + (above + bias) / total
    return bounded(Interval(score, math.expm1(low), math.expm1(high), worlds_played), 0.0, 100.0)


def _log_percent(rate: float) -> float:
    """Return f(rate) = ln(1 + 100 rate), the f of `crafter_score_interval`."""
    return math.log1p(100 * rate)


def _distances(shares_W: Sequence[float], episodes: int) -> tuple[float, float]:
    """Compute f(rate) - f(lower bound) and f(upper bound) - f(rate), by `nested_rate_interval`."""
    rate = nested_rate_interval(shares_W, episodes)
    assert rate.low is not None and rate.high is not None  # a rate always has an interval
    here = _log_percent(rate.mean)
    return max(here - _log_percent(rate.low), 0.0), max(_log_percent(rate.high) - here, 0.0)


def _sum_distance(scaled_NW: Sequence[Sequence[float]], distances_N: Sequence[float]) -> float:
    """Compute the distance d of `crafter_score_interval` between a sum and its bound.

        d^2 = (sum_w (sum_i a_i z_wi)^2 + sum_i a_i^2) / W + sum_j a_j^2

    z_wi are the [N, W] standardised shares, and a the [N] distances between the terms and their bounds. The
    index i runs over achievements whose share varies over worlds, j over the other achievements.
    """
    moves_W = [0.0] * len(scaled_NW[0])
    alone = 0.0
    for scaled_W, distance in zip(scaled_NW, distances_N, strict=True):
        if any(scaled_W):
            alone += distance**2 / len(scaled_W)
            moves_W = [move + distance * scaled for move, scaled in zip(moves_W, scaled_W, strict=True)]
        else:
            alone += distance**2
    return math.sqrt(alone + math.fsum(move**2 for move in moves_W) / len(moves_W))


def _standardise(shares_W: Sequence[float]) -> list[float]:
    """Subtract the mean and divide by the sample standard deviation; return zeros if all shares are equal."""
    if min(shares_W) == max(shares_W):
        return [0.0] * len(shares_W)
    deviation = stdev(shares_W)
    return [difference / deviation for difference in centred(shares_W)]


def _unseen_distance(shares_NW: Sequence[Sequence[float]], episodes: int) -> float:
    """Compute an upper bound of the sum of f (`_log_percent`) over the K achievements that were not unlocked.

        min(sqrt(K) f(z^2 / (n + z^2)), K f(U / (n K))),   U = k + z^2 / 2 + z sqrt(k + z^2 / 4)

    z is Z_975, and n is the effective count of `nested_rate_interval`. The first term of the minimum combines
    Wilson's upper bounds of K rates of 0. The second term assumes that the K rates sum to at most U / n. k is
    the number of achievements unlocked in exactly one world, which estimates how many new achievements one
    more world would show. U is an upper bound of the mean of a Poisson count whose observed value is k.

    Source: Good, Biometrika 40 (1953), p. 237: k / n estimates the probability of everything not yet seen.
    """
    unseen = [shares_W for shares_W in shares_NW if not any(shares_W)]
    if not unseen:
        return 0.0
    count = _effective_count(unseen[0], 0.0, episodes)
    once = sum(sum(map(bool, shares_W)) == 1 for shares_W in shares_NW)
    bound = once + Z_975**2 / 2 + Z_975 * math.sqrt(once + Z_975**2 / 4)
    alone = _log_percent(Z_975**2 / (count + Z_975**2))
    return min(math.sqrt(len(unseen)) * alone, len(unseen) * _log_percent(bound / (count * len(unseen))))


def _jackknife_bias(shares_W: Sequence[float]) -> float:
    """Estimate by the jackknife how far f(p) is below f(true rate) on average; p is the mean of W shares.

        max((W - 1) (f(p) - mean_w f(p without world w)), 0),   f is `_log_percent`

    Source: Quenouille, Biometrika 43 (1956), p. 353.
    """
    worlds, total = len(shares_W), math.fsum(shares_W)
    without = math.fsum(
        number * _log_percent(max(total - share, 0.0) / (worlds - 1))
        for share, number in Counter(shares_W).items()
    )
    return max((worlds - 1) * (_log_percent(total / worlds) - without / worlds), 0.0)


def wilson_interval(successes: int, count: int) -> Interval:
    """Compute the rate of `successes` in `count` independent trials, with its 95 % Wilson score interval.

        centre = (p + z^2 / 2n) / (1 + z^2 / n)
        half   = z / (1 + z^2 / n) * sqrt(p (1 - p) / n + z^2 / 4n^2)

    p is the rate, n is `count`, and z is Z_975. Unlike the normal approximation, the interval lies inside
    [0, 1], and its width is above 0 even for 0 or n successes. Raises ValueError for no trials, and for
    successes outside 0 .. count.

    Source: Wilson, JASA 22 (1927), p. 209.
    """
    if count < 1:
        raise ValueError("a rate needs at least one trial")
    if not 0 <= successes <= count:
        raise ValueError(f"successes must lie in 0 .. {count}, got {successes}")
    return _wilson(successes / count, count)


def nested_rate_interval(shares: Sequence[float], episodes: int) -> Interval:
    """Compute the mean success rate over worlds, with a 95 % interval that is valid for repeated worlds.

    Episodes of the same world are not independent. So Wilson's interval is computed with an effective number
    of trials n, between 1 and E:

        n = min(p (1 - p) / v, E) * (t_{E-1} / t_{W-1})^2,   v = sum_w (p_w - p)^2 / (W (W - 1))

    p_w is the share of successes in world w (`shares`), W the number of worlds, p the mean of p_w, E the
    number of episodes (at least W), and t Student's 97.5 % quantile. If p is 0 or 1, then v is 0 and says
    nothing about the variance, so W replaces min(...). With one episode per world, or a single world, n is W.
    Raises ValueError without worlds.

    Source: Korn and Graubard, Survey Methodology 24 (1998), p. 193, but with Wilson's interval, not theirs.
    """
    worlds = len(shares)
    if worlds == 0:
        raise ValueError("a rate needs at least one world")
    rate = min(fmean(shares), 1.0)
    interval = _wilson(rate, _effective_count(shares, rate, episodes))
    return Interval(interval.mean, interval.low, interval.high, worlds)


def paired_success_interval(differences: Sequence[float]) -> Interval:
    """Compute the mean difference of two players' success in the same n worlds, with its 95 % interval.

        p - q +- z sqrt((p + q - (p - q)^2) / (n + 2))
        p = (gains + 1) / (n + 2),   q = (losses + 1) / (n + 2)

    `differences` contains 1 for each world where only the second player succeeded (a gain), -1 where only the
    first did (a loss), and 0 otherwise. Student's t is not used, because its interval has width 0 if the
    players never differ, and is too narrow if they seldom do. Raises ValueError without worlds.

    Source: Bonett and Price, Journal of Educational and Behavioral Statistics 37 (2012), p. 479.
    """
    if not differences:
        raise ValueError("a difference needs at least one world")
    count = len(differences)
    gained = (sum(value > 0 for value in differences) + 1) / (count + 2)
    lost = (sum(value < 0 for value in differences) + 1) / (count + 2)
    half = Z_975 * math.sqrt((gained + lost - (gained - lost) ** 2) / (count + 2))
    interval = Interval(fmean(differences), gained - lost - half, gained - lost + half, count)
    return bounded(interval, -1.0, 1.0)


def _effective_count(shares: Sequence[float], rate: float, episodes: int) -> float:
    worlds = len(shares)
    if worlds == episodes or worlds == 1:
        return worlds  # one episode per world; or one world, from which no variance over worlds follows
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
