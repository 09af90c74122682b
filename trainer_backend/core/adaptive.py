"""A schedule of the mixture that adapts to the results of the actor and the fixed policies. Pure."""

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
    """Gives the fixed policies more samples while these teach the actor something:

        alpha = clip(1 - (1 - min_alpha) * counted * gap_share, min_alpha, max_alpha)
        gap_share = clip(gap / largest gap so far, 0, 1);  0 if no gap was ever above 0

    `counted` is the weight of a fixed sample in the update relative to a sample of the actor, in [0, 1]
    (`core.behaviour.counted_share`); it falls as the actor moves away from the fixed policies. `gap` is the
    fixed policies' mean outcome minus the actor's; it falls as the actor catches up. `counted` and each of
    the two outcomes are means over the last `window` iterations that have them. Fixed policies that are no
    better than the actor get the least share (alpha = max_alpha), and a larger one when the actor falls
    behind. Alpha is alpha_0 until actor and fixed policies have outcomes; an unknown `counted` is 1.

    The formula is our own: source 4 lists an adaptive schedule among its extensions, without a formula.
    """

    alpha_0: float
    min_alpha: float = MIN_ALPHA
    max_alpha: float = MAX_ALPHA
    window: int = WINDOW
    history: Sequence[Past] = ()
    """Finished iterations; the choice for an iteration reads only earlier ones."""

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
    """Return the mean outcome of the fixed policies minus the actor's, per iteration, once both are known."""
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
