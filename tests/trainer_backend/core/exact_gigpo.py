"""GiGPO in exact rational arithmetic, written from the equations: the oracle of test_gigpo.py.

Source: Feng et al., arXiv:2505.10978, eq. 3 to 8. A std is a square root, so it is taken in 50 digits.
"""

from collections.abc import Sequence
from decimal import Decimal, localcontext
from fractions import Fraction

Episode = tuple[str, Sequence[Fraction], Sequence[str]]


def exact_gigpo(
    episodes: Sequence[Episode], *, gamma: Fraction, fnorm: str, baseline: str
) -> list[tuple[Fraction, list[Fraction]]]:
    """A_E and [T] A_S of each episode (group id, rewards, state keys)."""
    found = []
    for group, rewards, keys in episodes:
        siblings = [j for j, other in enumerate(episodes) if other[0] == group]
        scores = [
            sum(episodes[j][1])
            for j in siblings
            for _ in range(len(episodes[j][1]) if baseline == "step" else 1)
        ]
        of_episode = normed(sum(rewards), scores, fnorm) if len(siblings) > 1 else Fraction(0)
        of_steps = [
            normed(
                return_to_go(rewards, t, gamma),
                [
                    return_to_go(episodes[j][1], u, gamma)
                    for j in siblings
                    for u, other in enumerate(episodes[j][2])
                    if other == key
                ],
                fnorm,
            )
            for t, key in enumerate(keys)
        ]
        found.append((of_episode, of_steps))
    return found


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
