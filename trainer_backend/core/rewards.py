"""Returns of decisions: discounted sums of the rewards r_t (`shared_schemas.rewards`) from a decision on."""

from collections.abc import Sequence

from trainer_backend.core.keys import refuse_no_share


def discounted_returns(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """Compute the return-to-go G_t of every decision of one episode.

        G_t = r_t + gamma * G_{t+1},   with G_T = 0

    r_t is the reward that decision t itself earned (t = 0 .. T-1), so G_0 is the discounted return of the
    whole episode. For an empty episode, the result is empty.

    Args:
        rewards_T: [T] reward of each decision, in reward units.
        gamma: discount per *decision* (not per token, not per env step), in [0, 1].

    Returns:
        [T] returns, same units as the rewards.

    Raises:
        ValueError: gamma is outside [0, 1].

    Source: Sutton & Barto, Reinforcement Learning, 2nd ed., eq. 3.9 (their R_{t+1} is our r_t).
    """
    refuse_no_share(gamma=gamma)
    returns_T = [0.0] * len(rewards_T)
    return_to_go = 0.0
    for t in reversed(range(len(rewards_T))):
        return_to_go = rewards_T[t] + gamma * return_to_go
        returns_T[t] = return_to_go
    return returns_T


def discounted_sizes(rewards_T: Sequence[float], gamma: float) -> list[float]:
    """Compute the [T] returns-to-go of |r_t|, the scale of rounding errors in `discounted_returns`."""
    return discounted_returns([abs(reward) for reward in rewards_T], gamma)
