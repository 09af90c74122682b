"""Computes true advantages of stored decisions, and scores advantage estimators against them. Pure.

A true advantage is measured by pairs of continuations. `evaluation.truth_player` plays them: in each pair,
the policy plays on once from the state after the stored decision and once from the state before it, with
the same random numbers.
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

# Number of choices that are sampled at a decision per pair. Sampling a choice costs one decision, playing a
# pair about twenty.
CHOICES = 4
_GOLDEN = (math.sqrt(5.0) - 1.0) / 2.0


@dataclass(frozen=True, slots=True)
class Departures:
    """How often the policy's choices at a stored decision change the return, and by how much.

    A sampled choice counts as a change if its return differs from the return of the stored choice.
    """

    sampled: int
    """N: number of choices that were sampled in the state before the decision."""
    count: float
    """x: estimate, from the pairs, of the number of sampled choices that change the return."""
    pairs: int
    """n: number of pairs whose difference d_k of returns (`TrueAdvantage`) is not 0."""
    square: float
    """Mean of d_k^2 over these n pairs, weighted by how frequent their choices are; 0 if n is 0."""


@dataclass(frozen=True, slots=True)
class TrueAdvantage:
    """The measured true advantage of one stored decision, in reward units.

        advantage = E_k[d_k],   d_k = r + gamma * G_k(s') - (r_k + gamma * G_k(s'_k)),   K pairs

    r is the stored reward and s' the stored next state. In pair k, the policy chose again in the state before
    the decision, earned r_k and reached s'_k. G_k(s) is the discounted return that the policy reached from s
    on. Both sides of a pair draw the same random numbers, also in the env steps of the decision itself. If
    the policy chose as stored, d_k is 0 and nothing is played. The frequency of each choice is estimated from
    more than K samples (`choice_strata`). The expected value of `advantage` is Q(s, a) - V(s), given the
    random numbers of the stored decision.

    Source: Q - V from Monte Carlo continuations: Kazemnejad et al., VinePPO, arXiv:2410.01679, section 4;
    common random numbers: Glasserman and Yao, Management Science 38 (1992).
    """

    rollout_id: str
    turn: int
    reward: float
    """Reward r_t of the decision."""
    advantage: float
    error: float
    """Standard error of `advantage`, from the decision's own pairs (`mean_difference`). If too few of
    these pairs changed the return, `pooled_errors` replaces the error."""
    action_value: float | None
    """Q: mean of r + gamma * G_k(s') over the played pairs; None if no pair was played."""
    pairs: int
    """K: number of complete pairs, also those in which nothing had to be played."""
    failed: int
    """Number of pairs that infrastructure failures lost. They are not part of any mean."""
    others: int
    """Number of complete pairs in which the policy's choice differed from the stored choice."""
    decisions: int
    """Number of decisions that were played for this measurement: its cost."""
    departures: Departures | None = None
    """None if the measurement was read from an older file."""

    @property
    def known_departures(self) -> Departures:
        """`departures`, or an estimate of it from the pairs if it is None."""
        if self.departures is not None:
            return self.departures
        sampled = CHOICES * (self.pairs + self.failed)
        if not self.others:
            return Departures(sampled, 0.0, 0, 0.0)
        share = self.others / self.pairs
        return Departures(sampled, share * sampled, self.others, (self.advantage / share) ** 2)

    @property
    def is_known(self) -> bool:
        """Whether the 95 % interval of the advantage excludes 0; it needs two pairs that changed the return.

        Student's t has `others` - 1 degrees of freedom: pairs with the stored choice show no variance.
        """
        size = largest([self.reward, self.action_value or 0.0])
        is_too_few = self.others < 2 or self.known_departures.pairs < 2
        if is_too_few or is_rounding(self.advantage, size=size):
            return False
        return abs(self.advantage) > t_quantile_975(self.others - 1) * self.error


class Stratum(NamedTuple):
    """A group of sampled choices: all equal to one frequent choice, or all rare choices together."""

    share: float
    """Share of all sampled choices that belong to this stratum."""
    members: tuple[int, ...]
    """Indices of those sampled choices in this stratum that begin a pair."""


def choice_strata(choices_N: Sequence[Hashable], pairs: int, seed: int) -> list[Stratum]:
    """Select min(`pairs`, N) of N sampled choices that each begin one pair, and group them by choice.

    Each choice gets a number of pairs in proportion to how often it was sampled, rounded down. A choice with
    two or more pairs is frequent and forms a stratum of its own. All other samples form the last stratum; the
    remaining pairs begin with random samples from this stratum (`seed`). If too few samples are left, one
    more pair each is given to the frequent choices that lost the most by rounding down.
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
    """Return the mean difference over the policy's choices, and the standard error of this mean.

        mean = sum_h w_h * mean(d_h),   error^2 = sum_h w_h^2 * s_h^2 / n_h + B / N

    Stratum h has the share w_h of the choices and n_h differences d_h, with the sample variance s_h^2. B is
    the variance between strata. It is divided by N, because the shares are estimated from all N sampled
    choices. `strata` contains the pair (share, differences) of each stratum; shares are scaled to a sum of 1.
    `sampled` is N. Raises ValueError for fewer than two differences.

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
    """Estimate how the policy's choices change the return; the arguments are those of `mean_difference`."""
    kept = [(share / len(values), values) for share, values in strata if values]
    total = math.fsum(share * len(values) for share, values in kept)
    changed = [(share / total, value) for share, values in kept for value in values if value]
    part = math.fsum(weight for weight, _ in changed)
    square = math.fsum(weight * value**2 for weight, value in changed) / part if changed else 0.0
    return Departures(sampled, part * sampled, len(changed), square)


def pooled_errors(truths: Sequence[TrueAdvantage]) -> list[TrueAdvantage]:
    """Replace the errors of decisions with too few changed returns by estimates from all decisions.

    If fewer than two pairs of a decision changed the return, the decision's own pairs do not show how much
    such changes vary. If none of the N sampled choices changed the return, the decision's own error is 0,
    although the policy may make a choice that does.

        A = w * mean(d),   w = x / N,   q ~ Beta(c * m, c * (1 - m)) given x of N
        error^2 = M * E[(q - w)^2] + S * w^2 / n,   and (M + S) * E[q^2] where n is 0

    A is the advantage, d are the differences that are not 0, and q is the probability of a choice that
    changes the return. Its Beta distribution is updated by the observation of x such choices among N. x, N
    and n are fields of `Departures`. All decisions together determine m and c (`_prior_chance`), the mean
    square M of a choice's effect on the return, and the variance S of single differences around that effect
    (`_other_choices`). The formula assumes that these effects have the same size in all decisions.

    If two or more pairs of a decision changed the return, all by the same amount, M is the square of this
    amount and S is 0. If no pair of any decision changed the return, the errors stay 0.

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

    x and N are fields of `Departures`. The prior weighs as much as c sampled choices. c is between 1 and the
    number of sampled choices of all decisions.
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

    M and S can be told apart only in decisions where two or more pairs changed the return. If there are fewer
    than two such decisions, M is set equal to S.
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
    """Yield all indices below `count`, in an order whose first n indices are spread evenly for every n.

    The first n indices thus select nearly a stratified sample from a sorted list. A larger n only adds items,
    so a measurement can be extended later. `seed` determines the first index.

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
    """How precise a set of measured true advantages is."""

    decisions: int
    """Number of measured decisions."""
    spread: float
    """Std of the true advantages over decisions, in reward units; the measurement noise is subtracted."""
    error: float
    """Root mean square of the true advantages' standard errors (`pooled_errors`)."""
    known: float
    """Share of the decisions for which the sign of the advantage is known (`TrueAdvantage.is_known`)."""
    failed: int
    """Number of pairs that infrastructure failures lost."""
    played: int
    """Number of decisions that were played for the measurement."""

    @property
    def ratio(self) -> float | None:
        """The standard error divided by the spread; None if the spread is 0."""
        return self.error / self.spread if self.spread > 0.0 else None

    def pairs_for(self, ratio: float, pairs: int) -> int | None:
        """Estimate how many pairs per decision reduce the standard error to `ratio` times the spread.

        `pairs` is the number of pairs per decision of this measurement. Return None if the spread is 0.
        """
        return None if self.ratio is None else math.ceil(pairs * (self.ratio / ratio) ** 2)


def _noise_square(truths: Sequence[TrueAdvantage]) -> float:
    """Compute the mean of the squared standard errors."""
    return math.fsum(item.error**2 for item in truths) / len(truths)


def measure_noise(truths: Sequence[TrueAdvantage]) -> Noise:
    """Compute the `Noise` of one or more measured decisions, with the errors of `pooled_errors`."""
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
    """Compute the correlation with the measured truth that an unbiased estimator with this std would have.

        A = T + e,  E[e | T] = 0:   corr(A, T + m) = std(T) / std(A) * sqrt(Var(T) / (Var(T) + Var(m)))

    T is the true advantage, m the measurement error of T, A the estimator's advantage, and e the estimator's
    noise. An estimator that reaches this correlation shows no bias. The comparison makes sense only if A is
    in reward units. `std` is the std of A; `std` and `noise` must be of the same decisions. The result is
    None if the measured truth is only noise, or if A varies less than T, which is impossible for an unbiased
    estimator.

    Source: Spearman, American Journal of Psychology 15 (1904), p. 72.
    """
    if noise.spread == 0.0 or std < noise.spread:
        return None
    return noise.spread / std * noise.spread / math.hypot(noise.spread, noise.error)


@dataclass(frozen=True, slots=True)
class Bias:
    """How far an estimator's scaled advantages lie above the truth, on average over decisions of one kind."""

    name: str
    decisions: int
    mean: float
    """Mean of scale * A - T, in reward units; the letters are those of `TruthScore`."""
    error: float | None
    """Standard error of `mean`; None for a single decision."""


@dataclass(frozen=True, slots=True)
class TruthScore:
    """Scores of an estimator's advantages A against the measured true advantages T of the same decisions.

    Source of the correction for noise: Spearman, American Journal of Psychology 15 (1904), p. 72.
    """

    decisions: int
    correlation: float | None
    """Pearson's correlation of A and T; None if either is constant. `low` and `high` bound its 95 % interval,
    which treats groups as independent units, because siblings share a world and usually a baseline."""
    low: float | None
    high: float | None
    noiseless: float | None
    """`correlation` divided by sqrt(1 - noise / variance of T), to correct for the noise of T; None if T is
    only noise."""
    rank: float | None
    """Spearman's rank correlation of A and T."""
    sign_agreement: float | None
    """Share of equal signs of A and T, over decisions where the sign of T is known and A is not 0."""
    scale: float
    """The factor c >= 0 for which c * A is nearest to T. `error` and `biases` compare c * A with T."""
    error: float
    """Mean of (scale * A - T)^2, minus the mean squared noise of T, in squared reward units."""
    explained: float | None
    """1 - `error` / mean square of the true advantages without noise: 1 if A is exact, 0 if A has no signal;
    None if T is only noise."""
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
    """Score an estimator's advantages on at least one measured decision; `groups` names their groups."""
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
    """Compute Spearman's rank correlation. Equal values all have the mean of their ranks."""
    return correlation(_ranks(left), _ranks(right))


def _ranks(values: Sequence[float]) -> list[float]:
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ranks: list[float] = (counts.cumsum() - (counts + 1) / 2)[places].tolist()
    return ranks


def _interval(
    advantages: Sequence[float], true: Sequence[float], groups: Sequence[str]
) -> tuple[float | None, float | None]:
    """Compute the 95 % interval of the correlation r by leaving out each of G groups.

    Return (None, None) for a single group, and if r, or r without one of the groups, is undefined or +-1.

        tanh(atanh r +- t_{G-1} s),   s^2 = (G - 1) / G * sum_g (z_g - mean z)^2

    z_g is atanh r without group g, and t_{G-1} is the 97.5 % quantile of Student's t with G - 1 degrees of
    freedom.

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
    """Compute Fisher's z = atanh r of the correlation r; None if r is undefined or |r| is 1."""
    found = correlation(left, right) if left else None
    return None if found is None or abs(found) >= 1.0 - 1e-12 else math.atanh(found)


def _biases(apart: Sequence[float], truths: Sequence[TrueAdvantage]) -> tuple[Bias, ...]:
    """Compute the bias for early, middle and late turns, and for decisions without and with a reward.

    `apart` contains scale * A - T of each decision.
    """
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
