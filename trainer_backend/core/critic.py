"""The values of a critic for an episode, by decision or by sampled token, and over its segments. Pure."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

from trainer_backend.core.segments import Segment
from trainer_backend.errors import AdvantageError, BatchError, place

# What an estimator reads a critic's values of.
ValueLevel = Literal["decision", "token"]


@dataclass(frozen=True, slots=True)
class ByToken:
    """One number for each sampled token of an episode; numbers for each decision are a plain [T] sequence.

    rows_T: for each decision, its numbers in order of its tokens; T >= 1, no row empty.
    """

    rows_T: Sequence[Sequence[float]]

    @property
    def flat(self) -> list[float]:
        """[N] one decision after the other."""
        return list(chain.from_iterable(self.rows_T))

    @property
    def firsts_T(self) -> list[float]:
        """[T] the number of the first token of each decision."""
        return [row[0] for row in self.rows_T]

    @property
    def means_T(self) -> list[float]:
        """[T] mean over the tokens of each decision."""
        return [math.fsum(row) / len(row) for row in self.rows_T]


OfEpisode = Sequence[float] | ByToken


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """The values of an episode and their targets; both by decision, or both by token.

    values: V as it was scored before credit was given, in reward units.
    returns: advantage plus value.
    """

    values: OfEpisode
    returns: OfEpisode


def firsts(numbers: OfEpisode) -> Sequence[float]:
    """[T] of each decision, or of its first token: where V(s_t) is read."""
    return numbers.firsts_T if isinstance(numbers, ByToken) else numbers


def targets_of(values: OfEpisode, advantages: OfEpisode) -> CriticTargets:
    """Returns of GAE: advantage plus value, each where it was given.

    Raises:
        ValueError: values and advantages of other lengths, or of another level.
    """
    if isinstance(values, ByToken) and isinstance(advantages, ByToken):
        rows = zip(values.rows_T, advantages.rows_T, strict=True)
        return CriticTargets(values, ByToken([_sums(*pair) for pair in rows]))
    if isinstance(values, ByToken) or isinstance(advantages, ByToken):
        raise ValueError("values and advantages must both be by decision, or both by token")
    return CriticTargets(values, _sums(values, advantages))


def values_of_episode(
    segments: Sequence[Segment], values: Sequence[Sequence[float]], *, level: ValueLevel
) -> OfEpisode:
    """The values of an episode where its estimator reads them.

    Args:
        segments: all of the episode.
        values: for each segment, [N] V where each of its sampled tokens is predicted, in reward units.
        level: "decision" reads V(s_t) where the first sampled token of decision t is predicted.

    Raises:
        AdvantageError: a decision sampled no token, so that its state was never read; a value that is not
            finite, by the name of its token.
    """
    decisions = max((int(t) + 1 for segment in segments for t in segment.spans["decision"]), default=0)
    rows: list[list[float]] = [[] for _ in range(decisions)]
    for segment, column in zip(segments, values, strict=True):
        for n, (t, value) in enumerate(zip(segment.decision.tolist(), column, strict=True)):
            if not math.isfinite(value):
                where = place(segment.rollout_id, t + 1, int(segment.sampled_positions[n]))
                raise AdvantageError(f"the critic's value is {value}", where=where)
            rows[t].append(value)
    for t, row in enumerate(rows):
        if not row:
            where = place(segments[0].rollout_id, t + 1)
            raise AdvantageError("no token was sampled, so a critic has no place to read V(s_t)", where=where)
    by_token = ByToken(rows)
    return by_token if level == "token" else by_token.firsts_T


def column_of(segment: Segment, of_episodes: Mapping[str, OfEpisode], what: str) -> list[float]:
    """[N] the number of each sampled token of a segment: its own, or its decision's.

    Raises:
        BatchError: a token without a number, or with one that is not finite; more numbers than tokens.
    """
    found = of_episodes.get(segment.rollout_id, ())
    offsets = _offsets(segment)
    if isinstance(found, ByToken):
        _refuse_other_counts(segment, offsets, found, what)
        numbers = [found.rows_T[t][j] for t, j in offsets]
    else:
        numbers = [found[t] if t < len(found) else math.nan for t, _ in offsets]
    for n, ((t, _), number) in enumerate(zip(offsets, numbers, strict=True)):
        if not math.isfinite(number):
            told = number if isinstance(found, ByToken) or t < len(found) else "missing"
            position = int(segment.sampled_positions[n])
            raise BatchError(f"its {what} is {told}", where=place(segment.rollout_id, t + 1, position))
    return numbers


def where_read(segment: Segment, values: OfEpisode) -> list[bool]:
    """[N] whether a value is read where the token is predicted: everywhere, or first in its decision."""
    return [isinstance(values, ByToken) or j == 0 for _, j in _offsets(segment)]


def _sums(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _offsets(segment: Segment) -> list[tuple[int, int]]:
    """[N] the decision of each sampled token, and which of that decision's tokens it is."""
    seen: dict[int, int] = {}
    offsets = []
    for t in segment.decision.tolist():
        offsets.append((t, seen.get(t, 0)))
        seen[t] = seen.get(t, 0) + 1
    return offsets


def _refuse_other_counts(
    segment: Segment, offsets: Sequence[tuple[int, int]], found: ByToken, what: str
) -> None:
    tokens = {t: j + 1 for t, j in offsets}
    for t, count in tokens.items():
        numbers = len(found.rows_T[t]) if t < len(found.rows_T) else 0
        if numbers != count:
            raise BatchError(
                f"{numbers} numbers ({what}) for {count} sampled tokens",
                where=place(segment.rollout_id, t + 1),
            )


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float | None:
    """1 - Var(G - V) / Var(G): 1 for a critic that knows the returns, 0 for one that says a constant.

    Below 0 it says less than a constant would. None where the returns are all equal, and nothing is to be
    explained.
    """
    misses = [g - v for g, v in zip(returns, values, strict=True)]
    spread = _squares(returns)
    return None if spread == 0.0 else 1.0 - _squares(misses) / spread


def _squares(numbers: Sequence[float]) -> float:
    """Sum of squared deviations from the mean."""
    mean = math.fsum(numbers) / max(len(numbers), 1)
    return math.fsum((number - mean) ** 2 for number in numbers)
