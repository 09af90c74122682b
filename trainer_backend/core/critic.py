"""A critic's values of an episode, by decision or by sampled token. Pure."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from shared_schemas.rounding import has_spread, largest
from trainer_backend.core.agreement import centred
from trainer_backend.core.columns import Row
from trainer_backend.core.keys import Table
from trainer_backend.core.segments import Segment
from trainer_backend.errors import AdvantageError, BatchError, place

# Whether an estimator reads a value per decision or per token.
ValueLevel = Literal["decision", "token"]


class HeadKeys(Table):
    """Keys of a critic that is a head of the policy."""

    value_coef: float = Field(default=0.5, gt=0)
    """critic: weight of half the squared error of the critic's values"""
    value_trunk_gradient: bool = False
    """critic: let the value loss train the policy's own weights too, not only the value head"""


class OwnCriticKeys(Table):
    """Keys of a critic with layers of its own."""

    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """own critic: constant learning rate of its layers' AdamW"""
    critic_passes: int = Field(default=2, ge=1)
    """own critic: passes over an iteration's decisions"""
    critic_batch_decisions: int = Field(default=256, ge=1)
    """own critic: decisions per optimizer step"""
    critic_warmup: int = Field(default=0, ge=0)
    """own critic: number of first iterations in which the critic learns and the policy does not"""


class CriticKeys(HeadKeys, OwnCriticKeys):
    """Keys of a job whose estimator reads values."""

    critic: Literal["head", "own"] = "head"
    """critic: head reads the policy's last hidden state by one linear layer; own is a second model, which
    begins as a copy of the policy and has an optimizer, batches and passes of its own"""
    value_clip: float | None = Field(default=None, gt=0)
    """critic: a value that moved further than this in an iteration has no gradient; reward units; absent: no
    limit"""
    value_learning_rate: float = Field(default=0.5, gt=0)
    """critic: about how far one step of the value head can move a value, in reward units: AdamW's rate is
    this number divided by the number of the head's inputs; it falls as learning_rate does"""


CRITICS: dict[str, type[Table]] = {"head": HeadKeys, "own": OwnCriticKeys}


@dataclass(frozen=True, slots=True)
class ByToken:
    """One number per sampled token of an episode. (Numbers per decision are a plain [T] sequence.)"""

    rows_T: Sequence[Sequence[float]]
    """For each decision, the numbers of its tokens in order; T >= 1, no row empty."""

    @property
    def flat(self) -> list[float]:
        """[N] all numbers, decision after decision."""
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
    """The values of an episode and their targets; both per decision, or both per token."""

    values: OfEpisode
    """V before credit was computed, in reward units."""
    returns: OfEpisode
    """Advantage plus value, with `critic_lambda` in the place of `gae_lambda`."""


def firsts(numbers: OfEpisode) -> Sequence[float]:
    """Return the [T] numbers of decisions, or those of their first tokens, where V(s_t) is read."""
    return numbers.firsts_T if isinstance(numbers, ByToken) else numbers


def make_targets(values: OfEpisode, advantages: OfEpisode) -> CriticTargets:
    """Compute the targets of GAE, advantage plus value. Raises ValueError for different lengths or levels."""
    if isinstance(values, ByToken) and isinstance(advantages, ByToken):
        rows = zip(values.rows_T, advantages.rows_T, strict=True)
        return CriticTargets(values, ByToken([_add(*pair) for pair in rows]))
    if isinstance(values, ByToken) or isinstance(advantages, ByToken):
        raise ValueError("values and advantages must both be by decision, or both by token")
    return CriticTargets(values, _add(values, advantages))


def values_of_episode(segments: Sequence[Segment], values: Sequence[Row], *, level: ValueLevel) -> OfEpisode:
    """Return an episode's values at the positions where its estimator reads them.

    `values` has for each segment the [N] V, in reward units, at the positions that predict its sampled
    tokens. The level "decision" reads V(s_t) at the first sampled token of decision t. Raises AdvantageError
    if a decision sampled no token, and for a value that is not finite.
    """
    rows = by_decision(segments, values)
    for segment, column in zip(segments, values, strict=True):
        segment.refuse_non_finite(column, "the critic's value", AdvantageError)
    for t, row in enumerate(rows):
        if not row:
            where = place(segments[0].rollout_id, t + 1)
            raise AdvantageError("no token was sampled, so there is no position to read V(s_t)", where=where)
    by_token = ByToken(rows)
    return by_token if level == "token" else by_token.firsts_T


def read_column(segment: Segment, of_episodes: Mapping[str, OfEpisode], what: str) -> NDArray[np.float64]:
    """Return [N] numbers, one for each sampled token of a segment: its own, or that of its decision.

    Raises BatchError for a missing number, a number that is not finite, and for more numbers than tokens.
    """
    found = of_episodes.get(segment.rollout_id, ())
    if isinstance(found, ByToken):
        counts_T, numbers = np.array([len(row) for row in found.rows_T]), np.array(found.flat)
        _refuse_other_counts(segment, counts_T, what)
        place_N = (counts_T.cumsum() - counts_T)[segment.decision] + offsets(segment)
    else:
        # The NaN at the end stands for missing numbers.
        numbers = np.array([*found, math.nan])
        place_N = np.minimum(segment.decision, len(found))
    column: NDArray[np.float64] = numbers[place_N]
    if not np.isfinite(column).all():
        n = int(np.isfinite(column).argmin())
        t, position = int(segment.decision[n]), int(segment.sampled_positions[n])
        number = column[n] if isinstance(found, ByToken) or t < len(found) else "missing"
        raise BatchError(f"its {what} is {number}", where=place(segment.rollout_id, t + 1, position))
    return column


def offsets(segment: Segment) -> NDArray[np.int64]:
    """Return the index of each sampled token within its decision, [N]."""
    before, seen = [], Counter[int]()
    for start, end, t, _, _ in segment.spans.tolist():
        before.append(seen[t] - start)
        seen[t] += end - start
    counts = segment.spans["end"] - segment.spans["start"]
    return segment.sampled_positions + np.repeat(np.array(before, np.int64), counts)


def by_decision(segments: Sequence[Segment], columns: Sequence[Row]) -> list[list[float]]:
    """Regroup an episode's numbers from [N] per segment to one list per decision.

    Raises ValueError if a column and its segment's sampled tokens differ in length.
    """
    decisions = max((int(t) + 1 for segment in segments for t in segment.spans["decision"]), default=0)
    rows: list[list[float]] = [[] for _ in range(decisions)]
    for segment, column in zip(segments, columns, strict=True):
        if len(column) != len(segment.logprobs):
            raise ValueError(f"{len(column)} values for {len(segment.logprobs)} sampled tokens")
        numbers, first = np.asarray(column).tolist(), 0
        for start, end, t, _, _ in segment.spans.tolist():
            rows[t] += numbers[first : first + end - start]
            first += end - start
    return rows


def _add(left: Sequence[float], right: Sequence[float]) -> list[float]:
    return [a + b for a, b in zip(left, right, strict=True)]


def _refuse_other_counts(segment: Segment, counts_T: NDArray[Any], what: str) -> None:
    tokens = Counter[int](segment.decision.tolist())
    for t, count in tokens.items():
        numbers = counts_T[t] if t < len(counts_T) else 0
        if numbers != count:
            raise BatchError(
                f"{numbers} numbers ({what}) for {count} sampled tokens",
                where=place(segment.rollout_id, t + 1),
            )


def explained_variance(values: Sequence[float], returns: Sequence[float]) -> float | None:
    """Compute 1 - Var(G - V) / Var(G): 1 for a perfect critic, 0 for a constant one, below 0 for worse.

    None if all returns are equal, up to rounding.
    """
    misses = [g - v for g, v in zip(returns, values, strict=True)]
    if not has_spread(returns, size=largest(returns)):
        return None
    # hypot, because squares of tiny rewards underflow to 0.
    ratio = math.hypot(*centred(misses)) / math.hypot(*centred(returns))
    return 1.0 - ratio * ratio
