"""True advantages of stored decisions, and scores of estimators against them. Pure.

A true advantage is measured by pairs of continuations, which `evaluation.truth_player` plays: in pair k the
policy plays on from after the decision, and again from before it, with the same random numbers.
"""

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import pstdev, pvariance, variance
from typing import NamedTuple

import numpy as np

from shared_schemas.rounding import clear_rounding, is_rounding, largest
from trainer_backend.core.agreement import correlation, sign_agreement
from trainer_backend.core.statistics import t_quantile_975

# Choices that are sampled before a decision, per pair. A choice costs one decision, a pair about twenty.
CHOICES = 4
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class Departures:
    """How often the policy's choices at a decision change the return, and by how much.

    A choice other than the stored one changes nothing if it gives exactly the same return.
    """

    sampled: int
    """N: number of sampled choices before the decision."""
    count: float
    """x: number of sampled choices that change the return, estimated from the pairs."""
    pairs: int
    """n: number of pairs with d_k other than 0."""
    square: float
    """Mean of d_k^2 (`TrueAdvantage`) over these n pairs, weighted by their choices' shares; else 0."""


@dataclass(frozen=True, slots=True)
class TrueAdvantage:
    """The measured truth of one stored decision, in reward units.

        advantage = E_k[d_k],   d_k = r + gamma * G_k(s') - (r_k + gamma * G_k(s'_k)),   K pairs

    s' is the stored next state. In pair k the policy chose again before the decision, earned r_k and reached
    s'_k. G_k(s) is the discounted return of the policy from s on; both sides of a pair draw the same random
    numbers, also in the env steps of the decision itself. If the policy chose as stored, d_k is 0 and nothing
    is played. The frequencies of choices come from more than K samples (`choice_strata`). So E[advantage] =
    Q(s, a) - V(s), given the random numbers of the stored decision.

    Source: Q - V from Monte Carlo continuations: Kazemnejad et al., VinePPO, arXiv:2410.01679, section 4;
    common random numbers: Glasserman and Yao, Management Science 38 (1992).
    """

    rollout_id: str
    turn: int
    reward: float
    """r_t."""
    advantage: float
    error: float
    """Standard error of `advantage` from the decision's own pairs (`mean_difference`); if these are too few,
    `pooled_errors` replaces it."""
    action_value: float | None
    """Q: mean of r + gamma * G_k(s') over played pairs; None without any."""
    pairs: int
    """K: complete pairs."""
    failed: int
    """Pairs lost to infrastructure failures; not part of any mean."""
    others: int
    """Pairs in which the policy chose differently from the stored decision."""
    decisions: int
    """Cost: the number of decisions played."""
    departures: Departures | None = None
    """None in older files."""

    @property
    def known_departures(self) -> Departures:
        """`departures`, or an estimate from the pairs, scaled to the sampled choices."""
        if self.departures is not None:
            return self.departures
        sampled = CHOICES * (self.pairs + self.failed)
        if not self.others:
            return Departures(sampled, 0.0, 0, 0.0)
        share = self.others / self.pairs
        return Departures(sampled, share * sampled, self.others, (self.advantage / share) ** 2)

    @property
    def is_known(self) -> bool:
        """Return whether the advantage's 95 % interval by Student's t excludes 0.

        It has `others` - 1 degrees of freedom, because pairs with the stored choice show no variance.
        """
        size = largest([self.reward, self.action_value or 0.0])
        is_too_few = self.others < 2 or self.known_departures.pairs < 2
        if is_too_few or is_rounding(self.advantage, size=size):
            return False
        return abs(self.advantage) > t_quantile_975(self.others - 1) * self.error


class Stratum(NamedTuple):
    """Pairs that begin with the same choice of the policy, or with any rare choice."""

    share: float
    """Share of the sampled choices that are of this kind."""
    members: tuple[int, ...]
    """For each pair, the index of a sampled choice."""


def choice_strata(choices_N: Sequence[Hashable], pairs: int, seed: int) -> list[Stratum]:
    """Select from N sampled choices those to play on from, for min(`pairs`, N) pairs.

    A frequent choice gets its share of the pairs, rounded down, if that is two or more. The remaining pairs
    go to random choices among all others, by `seed`; if these are too few, to the frequent choices that lost
    most by rounding.
    """
    total = len(choices_N)
    pairs = min(pairs, total)
    places: dict[Hashable, list[int]] = {}
    for index, choice in enumerate(choices_N):
        places.setdefault(choice, []).append(index)
    counts = {choice: pairs * len(members) // total for choice, members in places.items()}
    counts = {choice: count for choice, count in counts.items() if count >= 2}
    rare = [index for index, choice in enumerate(choices_N) if choice not in counts]
    left = pairs - sum(counts.values())
    drawn = min(left, len(rare))
    for choice in sorted(counts, key=lambda choice: -(pairs * len(places[choice]) % total))[: left - drawn]:
        counts[choice] += 1
    strata = [
        Stratum(len(places[choice]) / total, tuple(places[choice][:count]))
        for choice, count in counts.items()
    ]
    if rare:
        taken = np.random.default_rng(seed).permutation(len(rare))[:drawn]
        strata.append(Stratum(len(rare) / total, tuple(rare[place] for place in sorted(taken))))
    return strata


def mean_difference(strata: Sequence[tuple[float, Sequence[float]]], sampled: int) -> tuple[float, float]:
    """Compute the mean difference over the policy's choices, and its standard error.

        mean = sum_h w_h * mean(d_h),   error^2 = sum_h w_h^2 * s_h^2 / n_h + B / N

    s_h^2 is the sample variance of a stratum's n_h differences, w_h its share, B the variance between strata.
    B is divided by N, because all N sampled choices measure the shares. `strata` are (share, differences);
    shares are scaled to a sum of 1. `sampled` is N. Raises ValueError for fewer than two pairs.

    Source: double sampling for stratification, Cochran, Sampling Techniques, 3rd ed. 1977, section 12.2.
    """
    kept = [(share, values) for share, values in strata if values]
    everything = [value for _, values in kept for value in values]
    if len(everything) < 2:
        raise ValueError(f"a standard error needs at least two pairs, got {len(everything)}")
    total = math.fsum(share for share, _ in kept)
    mean = within = between = 0.0
    weights_means = [(share / total, math.fsum(values) / len(values)) for share, values in kept]
    mean = math.fsum(weight * value for weight, value in weights_means)
    for (weight, value), (_, values) in zip(weights_means, kept, strict=True):
        # A stratum with a single pair gets the variance of all pairs.
        within += weight * weight * variance(values if len(values) > 1 else everything) / len(values)
        between += weight * (value - mean) ** 2
    return mean, math.sqrt(within + between / sampled)


def departures(strata: Sequence[tuple[float, Sequence[float]]], sampled: int) -> Departures:
    """Estimate from a decision's pairs how choices change the return; arguments as in `mean_difference`."""
    kept = [(share / len(values), values) for share, values in strata if values]
    total = math.fsum(share * len(values) for share, values in kept)
    changed = [(share / total, value) for share, values in kept for value in values if value]
    part = math.fsum(weight for weight, _ in changed)
    square = math.fsum(weight * value**2 for weight, value in changed) / part if changed else 0.0
    return Departures(sampled, part * sampled, len(changed), square)


def pooled_errors(truths: Sequence[TrueAdvantage]) -> list[TrueAdvantage]:
    """Replace the errors of near-certain decisions by estimates from all decisions.

    With fewer than two pairs that change the return, a decision does not show how much these vary. If none of
    its N choices changed it, its own error is 0, although the policy may make such a choice.

        A = w * mean(d),   w = x / N,   q ~ Beta(c * m, c * (1 - m)) given x of N
        error^2 = M * E[(q - w)^2] + S * w^2 / n,   and (M + S) * E[q^2] where n is 0

    q is the probability of a choice that changes the return; x, N, n are those of `Departures`. All decisions
    together give m and c (`_prior_chance`), M, the mean square of such a change, and S, the variance of a
    single difference around it (`_other_choices`). So another choice in a near-certain decision is assumed to
    change the return as much as in other decisions. If two or more pairs all differ by the same amount, M is
    its square and S is 0. An error stays 0 only if no pair of any decision changed the return.

    Source: empirical Bayes for a proportion, Kleinman, Journal of the American Statistical Association 68
    (1973); variances pooled over many small samples, Smyth, Statistical Applications in Genetics and
    Molecular Biology 3 (2004).
    """
    mean, weight = _prior_chance([item.known_departures for item in truths])
    pooled = _other_choices(truths)

    def error(item: TrueAdvantage) -> float:
        seen = item.known_departures
        if seen.pairs >= 2 and (item.error > 0.0 or item.departures is None):
            return item.error
        moved, around = pooled if seen.pairs < 2 else (seen.square, 0.0)
        share, total = seen.count / seen.sampled, seen.sampled + weight
        expected = (seen.count + weight * mean) / total
        variance = expected * (1.0 - expected) / (total + 1.0)
        if not seen.pairs:
            return math.sqrt((moved + around) * (variance + expected**2))
        return math.sqrt(moved * (variance + (expected - share) ** 2) + around * share**2 / seen.pairs)

    return [replace(item, error=error(item)) for item in truths]


def _prior_chance(seen: Sequence[Departures]) -> tuple[float, float]:
    """Estimate the mean m of the probability q over decisions, and the weight c of its Beta distribution.

        c = m (1 - m) / Var(q) - 1,   Var(x / N) = Var(q) + (m (1 - m) - Var(q)) / N

    c counts like choices; it is between 1 and the number of all sampled choices.
    """
    shares = [item.count / item.sampled for item in seen]
    mean = math.fsum(shares) / len(shares)
    sampled = sum(item.sampled for item in seen)
    if len(shares) < 2:
        return mean, 1.0
    each, chance = sampled / len(seen), mean * (1.0 - mean)
    spread = (variance(shares) - chance / each) / (1.0 - 1.0 / each)
    return mean, max(1.0, min(chance / spread - 1.0, sampled)) if spread > 0.0 else float(sampled)


def _other_choices(truths: Sequence[TrueAdvantage]) -> tuple[float, float]:
    """Estimate M and S of `pooled_errors`, in squared reward units; M + S is the mean of d_k^2.

    Decisions with two or more pairs separate M from S; with fewer than two such decisions, M equals S.
    """
    seen = [(item.advantage, item.known_departures) for item in truths if item.known_departures.pairs]
    square = math.fsum(of.square for _, of in seen) / max(len(seen), 1)
    several = [
        (of.pairs, (mean * of.sampled / of.count) ** 2, of.square) for mean, of in seen if of.pairs >= 2
    ]
    if len(several) < 2:
        return square / 2, square / 2
    within = [max(of_all - of_mean, 0.0) * count / (count - 1) for count, of_mean, of_all in several]
    freedom = sum(count - 1 for count, _, _ in several)
    around = math.fsum(v * (count - 1) for v, (count, _, _) in zip(within, several, strict=True)) / freedom
    means = [of_mean - v / count for v, (count, of_mean, _) in zip(within, several, strict=True)]
    moved = max(math.fsum(means) / len(means), 0.0)
    part = moved / (moved + around) if moved + around > 0.0 else 0.5
    return part * square, (1.0 - part) * square


def even_order(count: int, seed: int) -> Iterator[int]:
    """Yield all indices below `count` in an order whose first n, for any n, are spread evenly.

    In a sorted list, the first n are nearly a stratified sample. A longer sample extends a shorter one, so a
    measurement can be continued. `seed` sets the first index.

    Source: the additive recurrence of the golden ratio; Kuipers and Niederreiter, Uniform Distribution of
    Sequences, 1974, chapter 2.3.
    """
    free = set(range(count))
    place = np.random.default_rng(seed).random()
    while free:
        index = min(int(place * count), count - 1)
        if index in free:
            free.discard(index)
            yield index
        place = (place + _GOLDEN) % 1.0


@dataclass(frozen=True, slots=True)
class Noise:
    """The precision of measured truths."""

    decisions: int
    """Measured decisions."""
    spread: float
    """Std of the true advantages over decisions, in reward units, without measurement noise."""
    error: float
    """Root mean square of the true advantages' standard errors (`pooled_errors`)."""
    known: float
    """Share of the decisions whose sign is known."""
    failed: int
    """Lost pairs."""
    played: int
    """Decisions that the measurement played."""

    @property
    def ratio(self) -> float | None:
        """Return the standard error divided by the spread; None without spread."""
        return self.error / self.spread if self.spread > 0.0 else None

    def pairs_for(self, ratio: float, pairs: int) -> int | None:
        """Estimate how many pairs, instead of `pairs`, reduce the standard error to `ratio` of the spread."""
        return None if self.ratio is None else math.ceil(pairs * (self.ratio / ratio) ** 2)


def _noise_square(truths: Sequence[TrueAdvantage]) -> float:
    """Compute the mean square of the standard errors."""
    return math.fsum(item.error**2 for item in truths) / len(truths)


def measure_noise(truths: Sequence[TrueAdvantage]) -> Noise:
    """Measure the noise of at least one decision, with `pooled_errors`."""
    truths = pooled_errors(truths)
    noise = _noise_square(truths)
    spread = pvariance([item.advantage for item in truths])
    return Noise(
        len(truths),
        math.sqrt(max(clear_rounding(spread - noise, size=noise), 0.0)),
        math.sqrt(noise),
        sum(item.is_known for item in truths) / len(truths),
        failed=sum(item.failed for item in truths),
        played=sum(item.decisions for item in truths),
    )


def unbiased_correlation(std: float, noise: Noise) -> float | None:
    """Compute the correlation that an unbiased estimator with this std has with the measured truth.

        A = T + e,  E[e | T] = 0:   corr(A, T + m) = std(T) / std(A) * sqrt(Var(T) / (Var(T) + Var(m)))

    T is the true advantage, m its measurement error, e the noise of the estimator. An estimator that reaches
    this correlation shows no bias. Its std measures its noise only if its advantages are in reward units.
    `std` and `noise` must be of the same decisions. None if the truth is only noise, or if A varies less than
    T, which is impossible for an unbiased estimator.

    Source: Spearman, American Journal of Psychology 15 (1904), p. 72.
    """
    if noise.spread == 0.0 or std < noise.spread:
        return None
    return noise.spread / std * noise.spread / math.hypot(noise.spread, noise.error)


@dataclass(frozen=True, slots=True)
class Bias:
    """The mean deviation of an estimator's scaled advantages from the truth, over some decisions."""

    name: str
    decisions: int
    mean: float
    """Mean of scale * A - truth, in reward units."""
    error: float | None
    """Standard error of the mean over decisions."""


@dataclass(frozen=True, slots=True)
class TruthScore:
    """Scores of an estimator's advantages A against the truth T of the same decisions.

    Source: the correction for noise: Spearman, American Journal of Psychology 15 (1904), p. 72.
    """

    decisions: int
    correlation: float | None
    """Pearson's correlation of A and T; None if either is constant. `low` and `high` are its 95 % interval
    over groups, because siblings share a world and most baselines."""
    low: float | None
    high: float | None
    noiseless: float | None
    """The correlation divided by sqrt(1 - noise / variance of T), to remove the noise of T; None if T is only
    noise."""
    rank: float | None
    """Spearman's correlation."""
    sign_agreement: float | None
    """Share of equal signs among decisions whose sign is known and whose A is not 0."""
    scale: float
    """The c >= 0 for which c * A is nearest to T; the learning rate compensates for an estimator's unit."""
    error: float
    """Mean squared error of scale * A minus the noise of T, in squared reward units."""
    explained: float | None
    """1 - error / mean square of the true advantages: 1 for the truth, 0 for no signal."""
    variance: float
    """Variance of scale * A."""
    std: float
    """Std of A, in its unit."""
    zero_share: float
    """Share of decisions with A = 0."""
    biases: tuple[Bias, ...]


def truth_score(
    advantages: Sequence[float], truths: Sequence[TrueAdvantage], groups: Sequence[str]
) -> TruthScore:
    """Score one estimator over at least one measured decision; `groups` are the decisions' groups."""
    truths = pooled_errors(truths)
    true = [item.advantage for item in truths]
    noise = _noise_square(truths)
    square = math.fsum(value * value for value in advantages)
    product = math.fsum(a * t for a, t in zip(advantages, true, strict=True))
    scale = max(product, 0.0) / square if square else 0.0
    scaled = [scale * value for value in advantages]
    apart = [a - t for a, t in zip(scaled, true, strict=True)]
    error = math.fsum(value * value for value in apart) / len(apart) - noise
    true_square = math.fsum(value * value for value in true) / len(true) - noise
    known = [(a, t) for a, t, item in zip(advantages, true, truths, strict=True) if item.is_known]
    low, high = _interval(advantages, true, groups)
    found = correlation(advantages, true)
    return TruthScore(
        decisions=len(truths),
        correlation=found,
        low=low,
        high=high,
        noiseless=_without_noise(found, true, noise),
        rank=rank_correlation(advantages, true),
        sign_agreement=sign_agreement([a for a, _ in known], [t for _, t in known]),
        scale=scale,
        error=error,
        explained=None if clear_rounding(true_square, size=noise) <= 0.0 else 1.0 - error / true_square,
        variance=pvariance(scaled),
        std=pstdev(advantages),
        zero_share=advantages.count(0.0) / len(advantages),
        biases=_biases(apart, truths),
    )


def _without_noise(found: float | None, true: Sequence[float], noise: float) -> float | None:
    spread = pvariance(true)
    if found is None or spread <= noise or is_rounding(spread - noise, size=noise):
        return None
    return found / math.sqrt(1.0 - noise / spread)


def rank_correlation(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Spearman's correlation; equal values share their mean rank."""
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: list[float] = (counts.cumsum() - (counts + 1) / 2)[places].tolist()
    return ranks


def _interval(
    advantages: Sequence[float], true: Sequence[float], groups: Sequence[str]
) -> tuple[float | None, float | None]:
    """Compute the 95 % interval of the correlation r over G groups.

    (None, None) for a single group, for |r| = 1, and if r is undefined without one of the groups.

        tanh(atanh r +- t_{G-1} s),   s^2 = (G - 1) / G * sum_g (z_g - mean z)^2

    z_g is atanh r without group g, t is Student's 97.5 % quantile.

    Source: Fisher's z, Metron 1 (1921); the jackknife of groups: Efron and Tibshirani, An Introduction to the
    Bootstrap, 1993, section 11.
    """
    names = sorted(set(groups))
    count = len(names)
    middle = _fisher_z(advantages, true)
    if count < 2 or middle is None:
        return None, None
    z_G = [z for name in names if (z := _fisher_z(*_without(name, groups, advantages, true))) is not None]
    if len(z_G) < count:
        return None, None
    error = math.sqrt((count - 1) ** 2 / count * variance(z_G))
    half = t_quantile_975(count - 1) * error
    return math.tanh(middle - half), math.tanh(middle + half)


def _without(name: str, groups: Sequence[str], *columns: Sequence[float]) -> Iterator[list[float]]:
    return (
        [value for value, group in zip(values, groups, strict=True) if group != name] for values in columns
    )


def _fisher_z(left: Sequence[float], right: Sequence[float]) -> float | None:
    """Compute Fisher's z of the correlation; None if either side is constant, or for |r| = 1."""
    found = correlation(left, right) if left else None
    return None if found is None or abs(found) >= 1.0 - 1e-12 else math.atanh(found)


def _biases(apart: Sequence[float], truths: Sequence[TrueAdvantage]) -> tuple[Bias, ...]:
    """Compute biases by thirds of the turns, and by whether the decision was rewarded."""
    turns = sorted(item.turn for item in truths)
    first, second = turns[len(turns) // 3], turns[2 * len(turns) // 3]
    kinds: Mapping[str, Callable[[TrueAdvantage], bool]] = {
        f"turns below {first}": lambda item: item.turn < first,
        f"turns {first} to {second - 1}": lambda item: first <= item.turn < second,
        f"turns from {second}": lambda item: item.turn >= second,
        "no reward": lambda item: item.reward == 0.0,
        "a reward": lambda item: item.reward != 0.0,
    }
    parts = {
        name: [value for value, item in zip(apart, truths, strict=True) if belongs(item)]
        for name, belongs in kinds.items()
    }
    return tuple(_bias(name, values) for name, values in parts.items() if values)


def _bias(name: str, values: Sequence[float]) -> Bias:
    if len(values) < 2:
        return Bias(name, len(values), values[0], None)
    count = len(values)
    return Bias(name, count, math.fsum(values) / count, math.sqrt(variance(values) / count))
