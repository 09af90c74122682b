"""A schedule that divides rollouts between the actor and fixed policies by their recent outcomes. Pure."""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shared_schemas.rounding import clear_rounding, largest
from trainer_backend.core.allocation import DrawnSchedule
from trainer_backend.core.keys import refuse_no_share
from trainer_backend.core.mixture_history import COUNTED, OUTCOME, Past, mean_over
from trainer_backend.core.policies import ACTOR

MIN_ALPHA, MAX_ALPHA, WINDOW = 0.1, 1.0, 5  # defaults of a job


@dataclass(frozen=True, slots=True)
class AdaptiveSchedule(DrawnSchedule):
    """Gives the fixed policies more samples while the actor can still learn from them.

    The actor samples with probability alpha:

        alpha = clip(1 - (1 - min_alpha) * counted * gap_share, min_alpha, max_alpha)
        gap_share = clip(gap / largest gap so far, 0, 1);  0 if no gap was ever above 0

    `counted`, in [0, 1], is how much a fixed policy's sample counts in the update, relative to a sample of
    the actor (`core.behaviour.counted_share`). It falls as the actor moves away from the fixed policies.
    `gap` is the mean outcome of the fixed policies minus the mean outcome of the actor. It falls as the actor
    catches up. `counted` and each mean outcome are taken over the last `window` iterations in which they were
    measured.

    While the fixed policies are no better than the actor, alpha is max_alpha. If the actor falls behind
    again, alpha falls again. Alpha is alpha_0 until outcomes of both the actor and the fixed policies are
    known. While `counted` is unknown, the formula uses 1.

    The formula is our own. Source 4 (docs/sources.md) lists an adaptive schedule, but gives no formula.
    """

    alpha_0: float
    min_alpha: float = MIN_ALPHA
    max_alpha: float = MAX_ALPHA
    window: int = WINDOW
    history: Sequence[Past] = ()
    """Finished iterations. The choice for an iteration reads only the iterations before it."""

    def __post_init__(self) -> None:
        refuse_no_share(alpha_0=self.alpha_0, min_alpha=self.min_alpha, max_alpha=self.max_alpha)
        if not self.min_alpha <= self.alpha_0 <= self.max_alpha or self.window < 1:
            raise ValueError(
                "alpha_0 must lie within min_alpha and max_alpha, and window must be 1 at least; got "
                f"{self.alpha_0}, {self.min_alpha}, {self.max_alpha} and {self.window}"
            )

    def alpha_at(self, step: int) -> float:
        known = [past for past in self.history if past.iteration < step]
        gaps = _gaps(known, self.window)
        if not gaps:
            return self.alpha_0
        largest = max(gaps)
        gap_share = min(max(gaps[-1] / largest, 0.0), 1.0) if largest > 0.0 else 0.0
        recent = [past for past in known if past.counted.keys() - {ACTOR}][-self.window :]
        counted = mean_over(recent, _fixed_policies(recent), of=COUNTED)
        share = 1.0 if counted is None else min(max(counted, 0.0), 1.0)
        alpha = 1.0 - (1.0 - self.min_alpha) * share * gap_share
        return min(max(alpha, self.min_alpha), self.max_alpha)


def _gaps(known: Sequence[Past], window: int) -> list[float]:
    """Return, per iteration, the mean outcome of the fixed policies minus the mean outcome of the actor.

    Each mean is taken over the last `window` iterations in which that side sampled. The result has no entry
    for iterations before outcomes of both sides are known.
    """
    of_actor, of_fixed = deque[Past](maxlen=window), deque[Past](maxlen=window)
    gaps = []
    for past in known:
        if ACTOR in past.episodes:
            of_actor.append(past)
        if past.episodes.keys() - {ACTOR}:
            of_fixed.append(past)
        actor = mean_over(of_actor, [ACTOR], of=OUTCOME)
        fixed = mean_over(of_fixed, _fixed_policies(of_fixed), of=OUTCOME)
        if actor is not None and fixed is not None:
            gaps.append(clear_rounding(fixed - actor, size=largest([fixed, actor])))
    return gaps


def _fixed_policies(past: Iterable[Past]) -> set[str]:
    return {policy for item in past for policy in item.episodes} - {ACTOR}
