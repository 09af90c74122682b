"""Estimators on states in exact rational arithmetic, written from their equations: oracles for the tests.

Every mean and distance is computed for each decision over the whole batch. Roots, logarithms and powers of e
are taken in 50 digits. Sources: the docstrings of the estimators.
"""

import re
from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

Episode = tuple[str, Sequence[Fraction], Sequence[str]]
Batch = Sequence[Episode]  # group, rewards, state keys (or texts)
Place = tuple[int, int]  # episode, decision


def return_to_go(rewards: Sequence[Fraction], t: int, gamma: Fraction) -> Fraction:
    return sum((gamma ** (k - t) * rewards[k] for k in range(t, len(rewards))), Fraction(0))


def normed(value: Fraction, values: Sequence[Fraction], fnorm: str) -> Fraction:
    if len(set(values)) < 2:
        return Fraction(0)
    mean = sum(values, Fraction(0)) / len(values)
    if fnorm == "one":
        return value - mean
    variance = sum(((x - mean) ** 2 for x in values), Fraction(0)) / (len(values) - 1)
    with localcontext() as context:
        context.prec = 50
        std = (Decimal(variance.numerator) / Decimal(variance.denominator)).sqrt()
        return (value - mean) / Fraction(std)


def siblings(batch: Batch, i: int) -> list[int]:
    return [j for j, (group, _, _) in enumerate(batch) if group == batch[i][0]]


def decisions(batch: Batch, i: int) -> list[Place]:
    return [(j, u) for j in siblings(batch, i) for u in range(len(batch[j][1]))]


def is_lone(batch: Batch, i: int) -> bool:
    return len(siblings(batch, i)) == 1


def same_state(batch: Batch, i: int, t: int) -> list[Place]:
    if is_lone(batch, i):
        return [(i, t)]
    return [(j, u) for j, u in decisions(batch, i) if batch[j][2][u] == batch[i][2][t]]


def mean(values: Sequence[Fraction]) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def value(batch: Batch, i: int, t: int, gamma: Fraction) -> Fraction:
    if t == len(batch[i][1]):
        return Fraction(0)
    return mean([return_to_go(batch[j][1], u, gamma) for j, u in same_state(batch, i, t)])


def td_error(batch: Batch, i: int, t: int, gamma: Fraction) -> Fraction:
    return batch[i][1][t] + gamma * value(batch, i, t + 1, gamma) - value(batch, i, t, gamma)


def of_episode(batch: Batch, i: int, fnorm: str, baseline: str) -> Fraction:
    times = {j: len(batch[j][1]) if baseline == "step" else 1 for j in siblings(batch, i)}
    scores = [sum(batch[j][1], Fraction(0)) for j in times for _ in range(times[j])]
    return normed(sum(batch[i][1], Fraction(0)), scores, fnorm)


def exact_gigpo(
    batch: Batch, *, gamma: Fraction, fnorm: str, baseline: str, omega: Fraction
) -> list[list[Fraction]]:
    def of_step(i: int, t: int, key: str) -> Fraction:
        same = [(j, u) for j, u in decisions(batch, i) if batch[j][2][u] == key]
        return normed(
            return_to_go(batch[i][1], t, gamma), [return_to_go(batch[j][1], u, gamma) for j, u in same], fnorm
        )

    return [
        [
            omega * of_episode(batch, i, fnorm, baseline) + (1 - omega) * of_step(i, t, key)
            for t, key in enumerate(keys)
        ]
        for i, (_, _, keys) in enumerate(batch)
    ]


def exact_g2po(
    batch: Batch, *, gamma: Fraction, fnorm: str, baseline: str, w: Fraction
) -> list[list[Fraction]]:
    td = {(i, t): td_error(batch, i, t, gamma) for i in range(len(batch)) for t in range(len(batch[i][1]))}
    return [
        [
            of_episode(batch, i, fnorm, baseline)
            + w * normed(td[i, t], [td[place] for place in same_state(batch, i, t)], fnorm)
            + w * normed(td[i, t], [td[place] for place in decisions(batch, i)], fnorm)
            for t in range(len(rewards))
        ]
        for i, (_, rewards, _) in enumerate(batch)
    ]


def exact_gagpo(batch: Batch, *, gamma: Fraction, share: Fraction, fnorm: str) -> list[list[Fraction]]:
    raw = {
        (i, t): sum(
            ((gamma * share) ** (k - t) * td_error(batch, i, k, gamma) for k in range(t, len(rewards))),
            Fraction(0),
        )
        for i, (_, rewards, _) in enumerate(batch)
        for t in range(len(rewards))
    }
    return [
        [normed(raw[i, t], [raw[place] for place in decisions(batch, i)], fnorm) for t in range(len(rewards))]
        for i, (_, rewards, _) in enumerate(batch)
    ]


GOAL = object()


def distances(batch: Batch, i: int, goals: Sequence[int]) -> dict[object, int]:
    """To the goal from each state of the group that has a path to it, shortened until nothing changes."""
    found: dict[object, int] = {GOAL: 0}
    while True:
        shorter = dict(found)
        for j, u in decisions(batch, i):
            keys = batch[j][2]
            after = keys[u + 1] if u + 1 < len(keys) else GOAL if j in goals else None
            if after in found:
                shorter[keys[u]] = min(shorter.get(keys[u], 10**6), 1 + found[after])
        if shorter == found:
            return found
        found = shorter


def exact_graphgpo(
    batch: Batch,
    cut: Sequence[bool],
    *,
    discount: Fraction,
    goal_score: Fraction | None,
    fnorm: str,
    baseline: str,
    w: Fraction,
) -> list[list[Fraction]]:
    """`cut`: which episodes a limit ended."""

    def closeness(place: Place) -> Fraction | None:
        j, u = place
        scores = {k: sum(batch[k][1], Fraction(0)) for k in siblings(batch, j)}
        least = goal_score
        if least is None:
            least = max(scores.values()) if len(set(scores.values())) > 1 else None
        goals = [] if least is None or is_lone(batch, j) else [k for k in scores if scores[k] >= least]
        if not goals:
            return None
        found, keys = distances(batch, j, goals), batch[j][2]
        farther = max(found.values()) + 1
        if u + 1 < len(keys):
            return discount ** found.get(keys[u + 1], farther)
        if j in goals:
            return Fraction(1)
        return None if cut[j] else discount**farther

    def of_step(i: int, t: int) -> Fraction:
        own = closeness((i, t))
        others = [close for place in same_state(batch, i, t) if (close := closeness(place)) is not None]
        return Fraction(0) if own is None else normed(own, others, fnorm)

    return [
        [of_episode(batch, i, fnorm, baseline) + w * of_step(i, t) for t in range(len(rewards))]
        for i, (_, rewards, _) in enumerate(batch)
    ]


def exact_gigpo_soft(
    batch: Batch, *, gamma: Fraction, temperature: Fraction, baseline: str, w: Fraction
) -> list[list[Fraction]]:
    """`batch` has texts for state keys. All terms count."""

    def vector(place: Place) -> dict[str, Decimal]:
        j, u = place
        documents = [set(re.findall(r"\w+", batch[k][2][v].lower())) for k, v in decisions(batch, j)]
        terms = re.findall(r"\w+", batch[j][2][u].lower())
        return {
            term: terms.count(term)
            * (1 + (Decimal(1 + len(documents)) / (1 + sum(term in other for other in documents))).ln())
            for term in terms
        }

    def similarity(left: Place, right: Place) -> Decimal:
        if batch[left[0]][2][left[1]] == batch[right[0]][2][right[1]]:
            return Decimal(1)
        a, b = vector(left), vector(right)
        lengths = [sum((x * x for x in v.values()), Decimal(0)).sqrt() for v in (a, b)]
        cosine = sum((a[term] * b[term] for term in a.keys() & b.keys()), Decimal(0))
        cosine = cosine / lengths[0] / lengths[1] if all(lengths) else Decimal(0)
        return ((cosine - 1) / (Decimal(temperature.numerator) / temperature.denominator)).exp()

    def of_step(i: int, t: int) -> Fraction:
        if is_lone(batch, i):
            return Fraction(0)
        weights = {place: Fraction(similarity((i, t), place)) for place in decisions(batch, i)}
        returns = {(j, u): return_to_go(batch[j][1], u, gamma) for j, u in weights}
        total = sum(weights.values(), Fraction(0))
        return returns[i, t] - sum((weights[p] * returns[p] for p in weights), Fraction(0)) / total

    with localcontext() as context:
        context.prec = 50
        return [
            [of_episode(batch, i, "one", baseline) + w * of_step(i, t) for t in range(len(rewards))]
            for i, (_, rewards, _) in enumerate(batch)
        ]
