"""Values that a critic predicts for an episode, by decision or by sampled token. Pure functions."""

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

# Whether an advantage estimator reads one value per decision or one per token.
ValueLevel = Literal["decision", "token"]


class HeadKeys(Table):
    """Job keys of a critic that is a value head on the policy's hidden states (`critic = "head"`)."""

    value_coef: float = Field(default=0.5, gt=0)
    """critic: weight of half the squared error of the critic's values"""
    value_trunk_gradient: bool = False
    """critic: let the value loss train the policy's own weights too, not only the value head"""


class OwnCriticKeys(Table):
    """Job keys of a critic that is a second model (`critic = "own"`)."""

    critic_learning_rate: float = Field(default=1e-3, gt=0)
    """own critic: learning rate of AdamW for all layers except the value head; it stays constant"""
    critic_passes: int = Field(default=2, ge=1)
    """own critic: passes over an iteration's decisions"""
    critic_batch_decisions: int = Field(default=256, ge=1)
    """own critic: decisions per optimizer step"""
    critic_warmup: int = Field(default=0, ge=0)
    """own critic: number of first iterations in which the critic learns and the policy does not"""


class CriticKeys(HeadKeys, OwnCriticKeys):
    """Job keys that are read if the advantage estimator reads a critic's values."""

    critic: Literal["head", "own"] = "head"
    """critic: head is one linear layer on the policy's last hidden state; own is a second model, which begins
    as a copy of the policy and has an optimizer, batches and passes of its own"""
    value_clip: float | None = Field(default=None, gt=0)
    """critic: a value that moved further than this, in reward units, within an iteration has no gradient;
    absent: no limit"""
    value_learning_rate: float = Field(default=0.5, gt=0)
    """critic: about how far one optimizer step of the value head can move a value, in reward units; AdamW's
    rate is this number divided by the number of the head's inputs; if critic is head, AdamW's rate follows
    the schedule of learning_rate"""


CRITICS: dict[str, type[Table]] = {"head": HeadKeys, "own": OwnCriticKeys}


@dataclass(frozen=True, slots=True)
class ByToken:
    """One number for each sampled token of an episode. (One number per decision is a plain [T] sequence.)"""

    rows_T: Sequence[Sequence[float]]
    """For each decision, the numbers of its sampled tokens in order; T >= 1, no inner sequence is empty."""

    @property
    def flat(self) -> list[float]:
        """All numbers, [N], one decision after the other."""
        return list(chain.from_iterable(self.rows_T))

    @property
    def firsts_T(self) -> list[float]:
        """The number of each decision's first sampled token, [T]."""
        return [row[0] for row in self.rows_T]

    @property
    def means_T(self) -> list[float]:
        """The mean of each decision's numbers, [T]."""
        return [math.fsum(row) / len(row) for row in self.rows_T]


OfEpisode = Sequence[float] | ByToken


@dataclass(frozen=True, slots=True)
class CriticTargets:
    """A critic's values of an episode and their targets in the value loss, by decision or by token."""

    values: OfEpisode
    """The critic's values when advantages were computed, in reward units."""
    returns: OfEpisode
    """The targets: advantage plus value. The advantage is GAE with `critic_lambda`, not `gae_lambda`."""


def firsts(numbers: OfEpisode) -> Sequence[float]:
    """Return one number per decision, [T]; for a `ByToken`, the number of the decision's first token."""
    return numbers.firsts_T if isinstance(numbers, ByToken) else numbers


def make_targets(values: OfEpisode, advantages: OfEpisode) -> CriticTargets:
    """Compute the targets of a critic: GAE advantage plus value.

    Raises ValueError if values and advantages differ in length, or if only one of them is by token.
    """
    if isinstance(values, ByToken) and isinstance(advantages, ByToken):
        rows = zip(values.rows_T, advantages.rows_T, strict=True)
        return CriticTargets(values, ByToken([_add(*pair) for pair in rows]))
    if isinstance(values, ByToken) or isinstance(advantages, ByToken):
        raise ValueError("values and advantages must both be by decision, or both by token")
    return CriticTargets(values, _add(values, advantages))


def values_of_episode(segments: Sequence[Segment], values: Sequence[Row], *, level: ValueLevel) -> OfEpisode:
    """Return an episode's values by sampled token, or one value per decision.

    `values` contains [N] numbers per segment: V, in reward units, at the position that predicts each sampled
    token. With the level "decision", V(s_t) is the number of the first sampled token of decision t.
    Raises AdvantageError if a decision has no sampled token, or if a value is not finite.
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
    """Return one number per sampled token of a segment, [N]: the token's own, or that of its decision.

    `of_episodes` maps rollout ids to numbers; `what` names them in errors. Raises BatchError if a number is
    missing or not finite, or if a `ByToken` does not have one number per sampled token of a decision.
    """
    found = of_episodes.get(segment.rollout_id, ())
    if isinstance(found, ByToken):
        counts_T, numbers = np.array([len(row) for row in found.rows_T]), np.array(found.flat)
        _refuse_other_counts(segment, counts_T, what)
        place_N = (counts_T.cumsum() - counts_T)[segment.decision] + offsets(segment)
    else:
        # Decisions without a number read the NaN at the end.
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
    """Return for each sampled token, [N], its index among the sampled tokens of its decision."""
    before, seen = [], Counter[int]()
    for start, end, t, _, _ in segment.spans.tolist():
        before.append(seen[t] - start)
        seen[t] += end - start
    counts = segment.spans["end"] - segment.spans["start"]
    return segment.sampled_positions + np.repeat(np.array(before, np.int64), counts)


def by_decision(segments: Sequence[Segment], columns: Sequence[Row]) -> list[list[float]]:
    """Regroup the numbers of an episode's sampled tokens: one column per segment -> one list per decision.

    Raises ValueError if a column and its segment's sampled tokens differ in number.
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
    """Compute the share of the returns' variance that the critic explains: 1 - Var(G - V) / Var(G).

    G are the returns, V the values. The result is 1 for a perfect critic, 0 for a constant one, and below 0
    for a critic that is worse than a constant. It is None if all returns are equal up to rounding.
    """
    misses = [g - v for g, v in zip(returns, values, strict=True)]
    if not has_spread(returns, size=largest(returns)):
        return None
    # math.hypot does not underflow; squares of tiny rewards would.
    ratio = math.hypot(*centred(misses)) / math.hypot(*centred(returns))
    return 1.0 - ratio * ratio
