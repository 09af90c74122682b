"""Estimator `branch`: a decision's return minus the mean return of rollouts that continue from its state."""

import math
import random
from collections.abc import Iterable, Mapping, Sequence

from pydantic import Field

from shared_schemas.rollouts import Rollout
from shared_schemas.rounding import clear_rounding
from trainer_backend.core.advantages.derivation import AT_TURN, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorKeys,
    EstimatorPlug,
    Parts,
)
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.rewards import discounted_returns, discounted_sizes
from trainer_backend.errors import AdvantageError, place


class BranchKeys(EstimatorKeys):
    """Keys that set the number of branches."""

    branches_per_episode: int = Field(default=2, ge=1, le=64)
    """branch, train_branches: number of decisions per episode before which branches start"""
    branch_rollouts: int = Field(default=2, ge=1, le=64)
    """branch, train_branches: number of branches that start before each of these decisions"""


METRICS = (
    Row(
        Metric("advantages/branched", "decisions measured by branches"),
        Metric("advantages/branched_share", "their share"),
        Metric("advantages/branched_abs", "their mean abs(A)"),
        Metric("advantages/branched_abs_stepwise", "what `stepwise` would have given them"),
        when="only with `branch`",
    ),
)


def branch(episodes: Sequence[EpisodeRewards], keys: BranchKeys) -> Advantages:
    """Subtract from a decision's return the mean return of the branches that start in the same state.

        A_t = G_t - 1/K * sum_k G^(k)_t        for a decision with K >= 1 branches
        A_t of `stepwise`                      for any other decision

    G_t is the episode's discounted return from decision t on. G^(k)_t is the discounted return of the k-th
    branch, a rollout in which the same policy continues from s_t. In a branch, the policy draws new random
    numbers, but the environment does not, because a branch starts from a snapshot that restores the
    environment's random generator. Branch and episode therefore share the environment's random draws until
    their actions differ, which usually lowers the variance. The baseline may depend on these draws, because
    a_t does not depend on them.

    The decisions that get branches are chosen before they are made (`branch_turns`), so the policy gradient
    is unbiased at gamma 1 with fixed denominators. Branches are trained only with `train_branches`
    (`core.forks`).

    Source: Kazemnejad et al., VinePPO, arXiv:2410.01679, which also takes V(s_t) as the mean return of
    rollouts from s_t. The advantage of VinePPO is r_t + V(s_{t+1}) - V(s_t). This estimator uses
    G_t - V(s_t), because no branches start from most states s_{t+1}.
    """
    others = stepwise(episodes, keys)
    rows = zip(episodes, others.per_episode, others.parts["baseline"], strict=True)
    of_episodes = [_compare_episode(*row, keys.gamma) for row in rows]
    advantages = [own_T for own_T, _ in of_episodes]
    measured = [
        (own, other)
        for episode, own_T, other_T in zip(episodes, advantages, others.per_episode, strict=True)
        for returns, own, other in zip(episode.branch_returns_T, own_T, other_T, strict=True)
        if returns
    ]
    decisions = sum(len(row_T) for row_T in advantages)
    diagnostics = others.diagnostics | {
        "advantages/branched": float(len(measured)),
        "advantages/branched_share": len(measured) / max(decisions, 1),
        "advantages/branched_abs": _mean([abs(own) for own, _ in measured]),
        "advantages/branched_abs_stepwise": _mean([abs(other) for _, other in measured]),
    }
    return Advantages(advantages, diagnostics, _parts(episodes, others, [row_T for _, row_T in of_episodes]))


def _compare_episode(
    episode: EpisodeRewards, others_T: Sequence[float], baselines_T: Sequence[float | None], gamma: float
) -> tuple[list[float], list[float | None]]:
    """Return the [T] advantages and the [T] baselines of one episode.

    `others_T` and `baselines_T` are the results of `stepwise`. A decision without branches keeps them.
    """
    if len(episode.branch_returns_T) != len(others_T):
        raise AdvantageError(
            "no branches were played from its decisions, which algorithm.advantage = 'branch' needs",
            where=place(episode.rollout_id),
            hint="They are played while a run trains with that estimator.",
        )
    returns_T = discounted_returns(episode.rewards_T, gamma)
    sizes_T = discounted_sizes(episode.rewards_T, gamma)
    advantages_T, own_T = list(others_T), list(baselines_T)
    for t, branches in enumerate(episode.branch_returns_T):
        if branches:
            baseline = _mean(branches)
            if not math.isfinite(baseline):
                where = place(episode.rollout_id, t + 1)
                raise AdvantageError(f"the returns of its branches are {list(branches)}", where=where)
            size = max(sizes_T[t], *map(abs, branches))
            advantages_T[t], own_T[t] = clear_rounding(returns_T[t] - baseline, size=size), baseline
    return advantages_T, own_T


def _parts(
    episodes: Sequence[EpisodeRewards], others: Advantages, baselines: list[list[float | None]]
) -> Parts:
    """Return the parts of `stepwise`, with its baselines replaced by `baselines`, and the part `branches`.

    A decision with branches lacks the part `compared`, because it is not compared with siblings.
    """
    compared = [
        [
            None if branches else others
            for branches, others in zip(episode.branch_returns_T, row_T, strict=True)
        ]
        for episode, row_T in zip(episodes, others.parts["compared"], strict=True)
    ]
    branches = [[len(row) or None for row in episode.branch_returns_T] for episode in episodes]
    return {**others.parts, "baseline": baselines, "compared": compared, "branches": branches}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0


# The branches of one episode: by a decision's turn, the rollouts that start just before that decision.
Branches = Mapping[int, Sequence[Rollout]]


def branch_turns(seed: int, *, count: int, max_decisions: int, first: int = 1) -> tuple[int, ...]:
    """Draw at most `count` turns before which branches of an episode start; return them sorted.

    All turns from `first` to `max_decisions` are equally likely. Only `seed` decides, because a choice that
    depended on the episode would bias the gradient. If the episode does not reach a drawn turn, no branches
    are played there.
    """
    turns = range(first, max_decisions + 1)
    return tuple(sorted(random.Random(seed).sample(turns, min(count, len(turns)))))


def branch_group(rollout_id: str, turn: int) -> str:
    """Return the group id of the branches that start just before turn `turn` of a rollout."""
    return f"{rollout_id.replace(':', '.')}/branch-{turn}"


def by_parent(branches: Iterable[Rollout]) -> dict[str, dict[int, list[Rollout]]]:
    """Group finished branches by the id of their parent rollout, then by the turn before which they start."""
    found: dict[str, dict[int, list[Rollout]]] = {}
    for rollout in sorted(branches, key=lambda item: item.sibling):
        episode = rollout.trajectory
        if episode is None or episode.parent_rollout_id is None or episode.parent_turn is None:
            continue
        turns = found.setdefault(episode.parent_rollout_id, {})
        turns.setdefault(episode.parent_turn + 1, []).append(rollout)
    return found


PLUGS = {
    "branch": EstimatorPlug(
        branch,
        BranchKeys,
        Derivation(
            ("advantage = return - baseline",),
            (AT_TURN, ("baseline", "mean of {branches} branch[es] from before this decision")),
        ),
        needs_branches=True,
    )
}
