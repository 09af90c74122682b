"""Branches: episodes that play on from the world before a decision, to measure what its state is worth. Pure.

Source: Kazemnejad et al., VinePPO, arXiv:2410.01679 (Monte Carlo values from the states of an episode).
"""

import random
from collections.abc import Iterable, Mapping, Sequence

from shared_schemas.rollouts import Rollout
from shared_schemas.trajectory import Trajectory

# Of one episode: by turn of the decision, the rollouts that began just before it.
Branches = Mapping[int, Sequence[Rollout]]


def branch_turns(seed: int, *, count: int, max_decisions: int, first: int = 1) -> tuple[int, ...]:
    """Turns of an episode that get branches, chosen before it is played, each turn as likely as any other.

    So nothing that happens in the episode decides it, neither an action nor what came of one: a choice that
    looks ahead would bias the gradient. A turn that the episode does not reach costs nothing.

    Args:
        seed: of the choice.
        count: turns wanted; there may be fewer.
        max_decisions: the longest that the episode can be.
        first: turns before it are not chosen.

    Returns:
        Different turns, counted from 1, in order.
    """
    turns = range(first, max_decisions + 1)
    return tuple(sorted(random.Random(seed).sample(turns, min(count, len(turns)))))


def by_parent(branches: Iterable[Rollout]) -> dict[str, dict[int, list[Rollout]]]:
    """Finished branches by the rollout that they left and the turn that they left it before."""
    found: dict[str, dict[int, list[Rollout]]] = {}
    for rollout in sorted(branches, key=lambda item: item.sibling):
        episode = rollout.trajectory
        if episode is None or episode.parent_rollout_id is None or episode.parent_turn is None:
            continue
        of_parent = found.setdefault(episode.parent_rollout_id, {})
        of_parent.setdefault(episode.parent_turn + 1, []).append(rollout)
    return found


def invalid_before(episode: Trajectory, turn: int) -> int:
    """Decisions before that turn that were refused: a branch goes on counting where its parent was."""
    return sum(step.step_info.invalid_reason is not None for step in episode.steps[: turn - 1])


def seconds_before(episode: Trajectory, turn: int) -> float:
    """What the decisions before that turn took, of policy and environment: a branch has so much less time."""
    return sum(step.step_info.policy_s + step.step_info.environment_s for step in episode.steps[: turn - 1])
