"""Who samples a rollout, the actor or a fixed policy, as pure functions of (seed, step).

    alpha(step) = P(the actor samples),   step = the iteration, from 1

A choice compares alpha with a number of a counter-based generator, u = h(seed, step, unit) in [0, 1): the
actor samples where u < alpha. Nothing is remembered between choices, so a resumed run makes the same ones;
and a higher alpha only ever turns samples of fixed policies into the actor's.

Source: 4-mixture-of-rollout-models.md, "Rollout Allocation Schedule"; DESIGN.md 4.10.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Literal

from trainer_backend.core.policies import ACTOR
from trainer_backend.core.seeds import derived_seed
from trainer_backend.core.selection import Selection, Weighted

_DRAWS = 2**53  # as many numbers as a float tells apart below 1
# What is chosen for within a step: nothing (all of it), or the names of a group or a rollout in it.
Unit = tuple[int | str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class RolloutAllocationSchedule(ABC):
    """A schedule.

    Attributes:
        seed: of the job; equal seeds choose equally.
        selection: which of the fixed policies samples, where the actor does not.
    """

    seed: int
    selection: Selection = field(default_factory=Weighted)

    @abstractmethod
    def alpha(self, step: int) -> float:
        """P(actor) in a step, in [0, 1]."""

    def get_policy_choice(self, step: int) -> str:
        """Who samples in a step: "actor" or the name of a fixed policy, "fixed" unless it has another."""
        return self.choices(step, [()])[0]

    def choices(self, step: int, units: Iterable[Unit]) -> list[str]:
        """Who samples each unit of a step; each draws for itself.

        Args:
            step: the iteration, from 1.
            units: their names, which tell them apart in their step.
        """
        shares = self.shares(step)
        return [
            _drawn(shares, derived_seed(self.seed, "allocation", step, *unit, below=_DRAWS) / _DRAWS)
            for unit in units
        ]

    def shares(self, step: int) -> dict[str, float]:
        """By policy, the probability that it samples; the actor first. They sum to 1."""
        alpha = self.alpha(step)
        fixed = self.selection.shares(step)
        return {ACTOR: alpha, **{name: (1.0 - alpha) * share for name, share in fixed.items()}}


def _drawn(shares: Mapping[str, float], u: float) -> str:
    """The policy in whose piece of [0, 1) u lies."""
    possible = {name: share for name, share in shares.items() if share > 0.0}
    ends = list(accumulate(possible.values()))
    found = bisect_right(ends, u)
    return list(possible)[min(found, len(ends) - 1)]  # rounded, the last piece may end just below 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ConstantSchedule(RolloutAllocationSchedule):
    """The same alpha in every step."""

    value: float

    def __post_init__(self) -> None:
        refuse_no_share(alpha=self.value)

    def alpha(self, step: int) -> float:
        return self.value


def constant_schedule(*, alpha: float, seed: int, selection: Selection) -> ConstantSchedule:
    """By the name that its key has."""
    return ConstantSchedule(seed=seed, selection=selection, value=alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearSchedule(RolloutAllocationSchedule):
    """alpha = min(alpha_0 + beta * step, max_alpha)."""

    alpha_0: float
    beta: float
    max_alpha: float = 1.0

    def __post_init__(self) -> None:
        refuse_no_share(alpha_0=self.alpha_0, max_alpha=self.max_alpha)
        _refuse_no_rate(beta=self.beta)

    def alpha(self, step: int) -> float:
        return min(self.alpha_0 + self.beta * step, self.max_alpha)


@dataclass(frozen=True, kw_only=True, slots=True)
class ExponentialSchedule(RolloutAllocationSchedule):
    """alpha = 1 - exp(-gamma * step)."""

    gamma: float

    def __post_init__(self) -> None:
        _refuse_no_rate(gamma=self.gamma)

    def alpha(self, step: int) -> float:
        return -math.expm1(-self.gamma * step)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepSchedule(RolloutAllocationSchedule):
    """All of one policy, then all of the other: they change places at each of the steps, step >= s."""

    switch_steps: Sequence[int]
    initial_policy: Literal["actor", "fixed"] = "fixed"

    def __post_init__(self) -> None:
        if any(before >= after for before, after in pairwise(self.switch_steps)):
            raise ValueError(f"switch_steps must rise, got {list(self.switch_steps)}")

    def alpha(self, step: int) -> float:
        switched = bisect_right(self.switch_steps, step) % 2 == 1
        return float((self.initial_policy == ACTOR) != switched)


def refuse_no_share(**found: float) -> None:
    """ValueError for what is no probability, by its name."""
    for name, value in found.items():
        if not 0.0 <= value <= 1.0:
            raise ValueError(f"{name} is a probability, in [0, 1], got {value}")


def _refuse_no_rate(**found: float) -> None:
    for name, value in found.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not below 0, got {value}")


@dataclass(frozen=True, slots=True)
class AllocationPlug:
    """A type of schedule on the plug board.

    Attributes:
        make: the schedule, from its keys as a job names them, `seed`, `selection` and, where `looks_back`,
            `history`.
        needs: keys that a job must give.
        takes: keys that it may give beside them.
    """

    make: Callable[..., RolloutAllocationSchedule]
    needs: frozenset[str]
    takes: frozenset[str] = frozenset()
    looks_back: bool = False
