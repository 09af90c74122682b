"""Who of several fixed policies samples: by weight (an ensemble), or by what each has shown so far. Pure."""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from trainer_backend.core.mixture_history import Past
from trainer_backend.core.policies import FIXED


class Selection(ABC):
    """Says how likely each fixed policy is, where the actor does not sample."""

    @abstractmethod
    def shares(self, step: int) -> Mapping[str, float]:
        """By name, probabilities that sum to 1; only of those that can be drawn."""


@dataclass(frozen=True, slots=True)
class Weighted(Selection):
    """Each as often as its weight says, in every step.

    Attributes:
        weights: by name, above 0; they need not sum to 1.
    """

    weights: Mapping[str, float] = field(default_factory=lambda: {FIXED: 1.0})

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
    """The one that promises most, by UCB1: first each once, then the largest

        mean_j + spread * sqrt(2 ln n / n_j)

    A pull is an iteration in which policy j sampled, its reward the mean outcome of j's episodes there: n_j
    pulls of n in all. `spread`, the largest less the smallest of these rewards, brings them to the [0, 1]
    that UCB1 is for; 1 while they are all equal. Of equals the first of `names` samples.

    Attributes:
        names: of the fixed policies.
        history: iterations that are over; only those before a step are looked at.

    Source: Auer, Cesa-Bianchi & Fischer, Finite-time Analysis of the Multiarmed Bandit Problem, Machine
    Learning 47 (2002), figure 1.
    """

    names: Sequence[str]
    history: Sequence[Past] = ()

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
    spread = (max(seen) - min(seen)) or 1.0

    def bound(name: str) -> float:
        count = len(pulls[name])
        return math.fsum(pulls[name]) / count + spread * math.sqrt(2 * math.log(len(seen)) / count)

    return max(pulls, key=bound)
