"""What changes over a run, as pure functions of how far the run is."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from trainer_backend.core.keys import Table

# From the share of the fall that is behind, in [0, 1], to how much of it has happened, in [0, 1].
Fall = Callable[[float], float]


class FallKeys(Table):
    """Of a rate that falls."""

    learning_rate_final: float = Field(default=0.1, ge=0, le=1)
    """share of learning_rate that it falls to; reached one step after the last"""


@dataclass(frozen=True, slots=True)
class FallPlug:
    """A course of the learning rate on the plug board, and the keys that it reads."""

    fall: Fall
    keys: type[Table] = FallKeys


def linear(behind: float) -> float:
    """The same loss in every step."""
    return behind


def cosine(behind: float) -> float:
    """Slow at both ends, half way down in the middle: (1 - cos(pi * behind)) / 2.

    Source: Loshchilov & Hutter, SGDR, arXiv:1608.03983, eq. 5, with one period.
    """
    return (1.0 - math.cos(math.pi * behind)) / 2.0


def constant(behind: float) -> float:
    """No fall at all, so `final` of `learning_rate` is not reached."""
    return 0.0


SCHEDULES = {"linear": FallPlug(linear), "cosine": FallPlug(cosine), "constant": FallPlug(constant, Table)}


def learning_rate(peak: float, *, progress: float, rise: float, final: float, fall: Fall = linear) -> float:
    """Linear rise to the peak, then the fall.

        progress < rise:  peak * progress / rise
        otherwise:        peak * (1 - (1 - final) * fall((progress - rise) / (1 - rise)))

    Args:
        peak: the highest rate.
        progress: share of the run that is done before the step, in [0, 1]; so 1, and `final`, lie one step
            behind the last one.
        rise: share of the run over which the rate rises, in [0, 1); then the first step's rate is 0.
        final: what the rate falls to, as a share of the peak, in [0, 1].
        fall: `linear`, `cosine` or `constant`.

    Raises:
        ValueError: a share is outside its range.

    Source: the rise: Goyal et al., Accurate, Large Minibatch SGD, arXiv:1706.02677, section 2.2.
    """
    if not 0.0 <= progress <= 1.0 or not 0.0 <= rise < 1.0 or not 0.0 <= final <= 1.0:
        raise ValueError(f"shares must lie in [0, 1], got progress={progress}, rise={rise}, final={final}")
    if progress < rise:
        return peak * progress / rise
    behind = (progress - rise) / (1.0 - rise)
    return peak * (1.0 - (1.0 - final) * fall(behind))
