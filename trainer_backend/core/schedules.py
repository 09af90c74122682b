"""Schedules of the learning rate, as pure functions of a run's progress."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pydantic import Field

from trainer_backend.core.keys import Table

# Given the share of the fall's duration that has passed, returns the share of the fall that is done. Both are
# in [0, 1].
Fall = Callable[[float], float]


class FallKeys(Table):
    """Keys of a job for a schedule whose learning rate falls."""

    learning_rate_final: float = Field(default=0.1, ge=0, le=1)
    """share of learning_rate that the falling rate would reach one step after the last step"""


class DesiredKlKeys(Table):
    """Keys of a job for a schedule that adapts the learning rate to the KL of each iteration's update."""

    desired_kl: float = Field(default=0.01, gt=0)
    """how far an iteration should move the policy: mean KL in nats of decisions with a token whose
    probability was at most skip_certain_above (absent: 0.99); if an iteration's KL is more than twice this
    value, the rate is divided by 1.5; if it is less than half of it, the rate is multiplied by 1.5"""
    desired_kl_final: float = Field(default=1.0, ge=0, le=1)
    """share of desired_kl that the linearly falling desired KL would reach one iteration after the last"""


@dataclass(frozen=True, slots=True)
class FallPlug:
    """A schedule of the learning rate that a job can name."""

    fall: Fall
    keys: type[Table] = FallKeys
    follows_kl: bool = False
    """Whether `followed_rate` changes the peak after each iteration."""


def linear(behind: float) -> float:
    """Return `behind`, the share of the fall's duration that has passed, so that the rate falls evenly."""
    return behind


def cosine(behind: float) -> float:
    """Return (1 - cos(pi * behind)) / 2: the rate falls slowly at the start and at the end.

    Source: Loshchilov & Hutter, SGDR, arXiv:1608.03983, eq. 5, with one period.
    """
    return (1.0 - math.cos(math.pi * behind)) / 2.0


def constant(behind: float) -> float:
    """Return 0, so that the rate stays at its peak and `learning_rate` ignores `final`."""
    return 0.0


SCHEDULES = {
    "linear": FallPlug(linear),
    "cosine": FallPlug(cosine),
    "constant": FallPlug(constant, Table),
    "desired_kl": FallPlug(constant, DesiredKlKeys, follows_kl=True),
}
# `followed_rate` changes the rate by _FACTOR if the KL differs from the desired KL by more than the factor
# _MARGIN. The rate stays between the first rate times _LOWEST and the first rate times _HIGHEST.
_FACTOR, _MARGIN, _LOWEST, _HIGHEST = 1.5, 2.0, 0.01, 10.0


def learning_rate(peak: float, *, progress: float, rise: float, final: float, fall: Fall = linear) -> float:
    """Compute the learning rate of a step: it rises linearly to the peak, and from the peak on it falls.

        progress < rise:  peak * progress / rise
        otherwise:        peak * (1 - (1 - final) * fall((progress - rise) / (1 - rise)))

    Args:
        peak: the highest rate.
        progress: share of the run before this step, in [0, 1]. Progress 1, where the rate is `final` times
            the peak, is reached one step after the last step.
        rise: share of the run over which the rate rises, in [0, 1). If it is above 0, the first rate is 0.
        final: share of the peak to which the rate falls, in [0, 1].
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


def followed_rate(rate: float, kl: float, *, desired: float, begin: float) -> float:
    """Return the learning rate of the next iteration, if this iteration moved the policy by a KL of `kl`.

        kl > 2 * desired:        rate / 1.5, at least begin / 100
        0 < kl < desired / 2:    rate * 1.5, at most begin * 10
        otherwise:               rate

    `kl` and `desired` are in nats; `begin` is the rate of the first iteration. The KL grows with the square
    of the rate. The range of rates that stay unchanged therefore spans a factor of 2, and a change by a
    factor of 1.5 cannot jump over this range.

    Source: RSL-RL, github.com/leggedrobotics/rsl_rl, algorithms/ppo.py (schedule "adaptive", bounds of 1e-5
    and 1e-2 around the usual rate of 1e-3); the idea: Schulman et al., PPO, arXiv:1707.06347, section 4.
    """
    if kl > desired * _MARGIN:
        return max(rate / _FACTOR, begin * _LOWEST)
    if 0.0 < kl < desired / _MARGIN:
        return min(rate * _FACTOR, begin * _HIGHEST)
    return rate
