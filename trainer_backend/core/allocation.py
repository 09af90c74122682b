"""Chooses whether the actor or a fixed policy samples a rollout; pure functions of (seed, step).

    alpha(step) = P(the actor samples),   step = the iteration, from 1

The actor samples if u < alpha. The number u in [0, 1) is a hash of the seed, the step, and the name of a
unit: the iteration, a group or a rollout. A resumed run therefore makes the same choices. If alpha is raised
and u stays the same, some samples of fixed policies become samples of the actor, and no other choice changes.

Source: 4-mixture-of-rollout-models.md, "Rollout Allocation Schedule"; DESIGN.md 4.10.
"""

import math
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import Parameter, signature
from itertools import accumulate, pairwise
from numbers import Real
from typing import Any, Literal, get_type_hints

from pydantic import create_model

from shared_schemas.base import did_you_mean
from shared_schemas.rounding import has_spread, largest
from trainer_backend.core.keys import Table, refuse_no_share
from trainer_backend.core.mixture_history import Past
from trainer_backend.core.policies import ACTOR, FIXED
from trainer_backend.core.seeds import derived_seed
from trainer_backend.errors import JobError


class Selection(ABC):
    """Chooses one of several fixed policies if the actor does not sample."""

    @abstractmethod
    def shares(self, step: int) -> Mapping[str, float]:
        """Return the probability of each fixed policy that can be drawn, by name; they sum to 1."""


@dataclass(frozen=True, slots=True)
class Weighted(Selection):
    """An ensemble: in every iteration, each fixed policy is drawn in proportion to its weight."""

    weights: Mapping[str, float] = field(default_factory=lambda: {FIXED: 1.0})
    """Weight of each policy, by name; above 0. Weights need not sum to 1."""

    def __post_init__(self) -> None:
        if not self.weights or not all(0.0 < weight < math.inf for weight in self.weights.values()):
            raise ValueError(
                f"weights must be above 0 and finite, and one at least; got {dict(self.weights)}"
            )

    def shares(self, step: int) -> Mapping[str, float]:
        total = math.fsum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}


@dataclass(frozen=True, slots=True)
class ByReward(Selection):
    """Chooses among fixed policies with the bandit algorithm UCB1.

    First, each policy is chosen once. Afterwards, the choice is always the policy j with the largest

        mean_j + spread * sqrt(2 ln n / n_j)

    A pull of j is an iteration in which policy j sampled. The reward of the pull is the mean outcome of j's
    episodes in that iteration. mean_j is the mean reward of j's pulls, n_j is the number of j's pulls, and n
    is the number of pulls of all policies. UCB1 assumes rewards in [0, 1]. `spread`, the largest reward minus
    the smallest reward, adapts the formula to other ranges; it is 1 while all rewards are equal. Ties go to
    the policy that comes first in `names`, the names of the fixed policies.

    Source: Auer, Cesa-Bianchi & Fischer, Finite-time Analysis of the Multiarmed Bandit Problem, Machine
    Learning 47 (2002), figure 1.
    """

    names: Sequence[str]
    history: Sequence[Past] = ()
    """Finished iterations. The choice for an iteration reads only the iterations before it."""

    def shares(self, step: int) -> Mapping[str, float]:
        pulls = {
            name: [
                past.outcomes[name]
                for past in self.history
                if past.iteration < step and name in past.episodes and name in past.outcomes
            ]
            for name in self.names
        }
        untried = [name for name, rewards in pulls.items() if not rewards]
        return {untried[0] if untried else _most_promising(pulls): 1.0}


def _most_promising(pulls: Mapping[str, Sequence[float]]) -> str:
    seen = [reward for rewards in pulls.values() for reward in rewards]
    spread = max(seen) - min(seen) if has_spread(seen, size=largest(seen)) else 1.0

    def bound(name: str) -> float:
        count = len(pulls[name])
        return math.fsum(pulls[name]) / count + spread * math.sqrt(2 * math.log(len(seen)) / count)

    return max(pulls, key=bound)


_LONGEST_VALUE = 100  # characters of a schedule's result that an error message shows
_DRAWS = 2**53  # a float distinguishes this many numbers below 1
# Names the part of an iteration that a choice is for: () is the whole iteration, other tuples name a group or
# a rollout.
Unit = tuple[int | str, ...]


class RolloutAllocationSchedule(ABC):
    """Chooses the policy that samples in each iteration. A subclass must define only `get_policy_choice`.

    Source: 4-mixture-of-rollout-models.md, "Base Schedule Class".
    """

    __slots__ = ()

    @abstractmethod
    def get_policy_choice(self, step: int) -> str:
        """Return who samples in iteration `step` (from 1): "actor" or "fixed"."""


@dataclass(frozen=True, slots=True)
class DrawnSchedule(RolloutAllocationSchedule):
    """A schedule that draws at random who samples; the actor is drawn with probability alpha.

    It draws once for a whole iteration, or once for each part of the iteration, such as a group or a rollout.
    """

    seed: int = field(default=0, kw_only=True)
    """The job's seed; equal seeds give equal choices."""
    selection: Selection = field(default_factory=Weighted, kw_only=True)
    """Chooses the fixed policy if the actor does not sample."""

    @abstractmethod
    def alpha_at(self, step: int) -> float:
        """Return the probability that the actor samples in iteration `step`, in [0, 1]."""

    def get_policy_choice(self, step: int) -> str:
        """Return who samples in iteration `step`: "actor", or a fixed policy's name ("fixed" if unnamed)."""
        return self.choices(step, [()])[0]

    def choices(self, step: int, units: Iterable[Unit]) -> list[str]:
        """Draw the policy that samples each unit of iteration `step`.

        The draws are independent if the units have distinct names.
        """
        shares = self.shares(step)
        return [
            _draw_policy(shares, derived_seed(self.seed, "allocation", step, *unit, below=_DRAWS) / _DRAWS)
            for unit in units
        ]

    def shares(self, step: int) -> dict[str, float]:
        """Return the probability of each policy to sample in iteration `step`, by name, the actor first."""
        alpha = self.alpha_at(step)
        fixed = self.selection.shares(step)
        return {ACTOR: alpha, **{name: (1.0 - alpha) * share for name, share in fixed.items()}}


def _draw_policy(shares: Mapping[str, float], u: float) -> str:
    """Return the policy whose interval contains u.

    The shares of the policies divide [0, 1) into one interval per policy.
    """
    possible = {name: share for name, share in shares.items() if share > 0.0}
    ends = list(accumulate(possible.values()))
    found = bisect_right(ends, u)
    return list(possible)[min(found, len(ends) - 1)]  # by rounding, the last end may be below 1


@dataclass(frozen=True, slots=True)
class ConstantSchedule(DrawnSchedule):
    """A schedule with the same alpha in every iteration."""

    alpha: float

    def __post_init__(self) -> None:
        refuse_no_share(alpha=self.alpha)

    def alpha_at(self, step: int) -> float:
        return self.alpha


@dataclass(frozen=True, slots=True)
class LinearSchedule(DrawnSchedule):
    """A schedule with alpha = min(alpha_0 + beta * step, max_alpha)."""

    alpha_0: float
    beta: float
    max_alpha: float = 1.0

    def __post_init__(self) -> None:
        refuse_no_share(alpha_0=self.alpha_0, max_alpha=self.max_alpha)
        _refuse_no_rate(beta=self.beta)

    def alpha_at(self, step: int) -> float:
        return min(self.alpha_0 + self.beta * step, self.max_alpha)


@dataclass(frozen=True, slots=True)
class ExponentialSchedule(DrawnSchedule):
    """A schedule with alpha = 1 - exp(-gamma * step)."""

    gamma: float

    def __post_init__(self) -> None:
        _refuse_no_rate(gamma=self.gamma)

    def alpha_at(self, step: int) -> float:
        return -math.expm1(-self.gamma * step)


@dataclass(frozen=True, slots=True)
class StepSchedule(DrawnSchedule):
    """Switches between the actor and the fixed policies at the start of each iteration in `switch_steps`."""

    switch_steps: Sequence[int]
    initial_policy: Literal["actor", "fixed"] = "fixed"

    def __post_init__(self) -> None:
        if any(before >= after for before, after in pairwise(self.switch_steps)):
            raise ValueError(f"switch_steps must rise, got {list(self.switch_steps)}")
        if self.initial_policy not in (ACTOR, FIXED):
            raise ValueError(f"initial_policy is {self.initial_policy!r}; known: {ACTOR}, {FIXED}")

    def alpha_at(self, step: int) -> float:
        switched = bisect_right(self.switch_steps, step) % 2 == 1
        return float((self.initial_policy == ACTOR) != switched)


@dataclass(frozen=True, slots=True)
class _Checked(DrawnSchedule):
    """Follows the schedule `by`, and raises JobError if `by` returns an invalid choice or alpha.

    If the class of `by` defines `get_policy_choice` itself, that method decides whether the actor samples.
    Otherwise the actor is drawn with the alpha of `by`. If the actor does not sample, `selection` chooses a
    fixed policy.
    """

    by: RolloutAllocationSchedule

    def alpha_at(self, step: int) -> float:
        by = self.by
        if isinstance(by, DrawnSchedule) and type(by).get_policy_choice is DrawnSchedule.get_policy_choice:
            where, alpha, shown = _call_schedule(by, by.alpha_at, step)
            if not isinstance(alpha, Real) or not 0.0 <= float(alpha) <= 1.0:
                raise JobError(f"{where} is {shown}; alpha is a probability, a number in [0, 1]")
            return float(alpha)
        where, choice, shown = _call_schedule(by, by.get_policy_choice, step)
        if not isinstance(choice, str) or choice not in (ACTOR, FIXED):
            raise JobError(f"{where} is {shown}{did_you_mean(shown, (ACTOR, FIXED))}")
        return float(choice == ACTOR)


def _call_schedule(by: object, ask: Callable[[int], object], step: int) -> tuple[str, object, str]:
    """Call `ask`, a method of the schedule `by`, for iteration `step`.

    Returns the method's name with file and line, the method's result, and the result as text.
    """
    # Imported here, because it imports asyncio and structlog, which take a tenth of a command's start.
    from service_kit.boundary import Boundary, describe_line

    call = f"{type(by).__name__}.{ask.__name__}({step})"
    with Boundary(call, JobError, ask):
        value = ask(step)
        return f"{call} ({describe_line(ask)})", value, repr(value)[:_LONGEST_VALUE]


def _refuse_no_rate(**found: float) -> None:
    for name, value in found.items():
        if not 0.0 <= value < math.inf:
            raise ValueError(f"{name} must be finite and not below 0, got {value}")


# Arguments of a schedule's constructor that are not job keys.
_GIVEN = frozenset({"seed", "selection", "history"})
_UNNAMED = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_NO_DEFAULT = Parameter.empty


@dataclass(frozen=True, slots=True)
class AllocationPlug:
    """A type of schedule that a job can select by name."""

    kind: type[RolloutAllocationSchedule]
    """Class of the schedule. The arguments of its constructor are job keys (see `keys`), except `seed`,
    `history` and `selection`. `schedule` passes `seed` and `history`, and leaves out `selection`."""

    @property
    def keys(self) -> type[Table]:
        """The class of the schedule's job keys.

        Keys that [rollout_allocation_schedule] does not define are in [rollout_allocation_schedule.NAME].
        """
        return _build_keys(self.kind)

    @property
    def needs(self) -> frozenset[str]:
        """The names of the keys that a job must set, which are the arguments without a default."""
        arguments = self.arguments()
        return frozenset(name for name in arguments.keys() - _GIVEN if arguments[name].default is _NO_DEFAULT)

    @property
    def takes(self) -> frozenset[str]:
        """The names of the keys that a job may set, which are the arguments with a default."""
        return frozenset(self.arguments()) - _GIVEN - self.needs

    @property
    def looks_back(self) -> bool:
        """Whether a choice depends on earlier iterations."""
        return "history" in self.arguments()

    def arguments(self) -> dict[str, Parameter]:
        named = signature(self.kind).parameters
        return {name: item for name, item in named.items() if item.kind not in _UNNAMED}

    def schedule(
        self, keys: Mapping[str, Any], *, seed: int, selection: Selection, history: Sequence[Past] = ()
    ) -> DrawnSchedule:
        """Build the schedule from a job's keys, so that its choices are checked.

        Raises JobError if the constructor of the schedule's class raises an exception.
        """
        from service_kit.boundary import Boundary

        given = {"seed": seed, "history": history}
        given = {name: value for name, value in given.items() if name in self.arguments()}
        with Boundary(f"{self.kind.__name__}(...)", JobError, self.kind.__init__):
            return _Checked(self.kind(**keys, **given), seed=seed, selection=selection)


@cache
def _build_keys(kind: type[RolloutAllocationSchedule]) -> type[Table]:
    """Build the class of a schedule's job keys from the arguments of its constructor."""
    named, hints = AllocationPlug(kind).arguments(), get_type_hints(kind.__init__)
    fields = {
        name: (hints.get(name, Any), ... if item.default is _NO_DEFAULT else item.default)
        for name, item in named.items()
        if name not in _GIVEN
    }
    return create_model(kind.__name__, __base__=Table, **fields)  # type: ignore[call-overload,no-any-return]


ALLOCATIONS: dict[str, AllocationPlug] = {
    "constant": AllocationPlug(ConstantSchedule),
    "linear": AllocationPlug(LinearSchedule),
    "exponential": AllocationPlug(ExponentialSchedule),
    "step": AllocationPlug(StepSchedule),
}
