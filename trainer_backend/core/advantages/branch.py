"""Branch: the return of a decision against what others made of the very state that it was made in."""

import math
from collections.abc import Sequence

from trainer_backend.core.advantages.episodes import AdvantageConfig, Advantages, EpisodeRewards
from trainer_backend.core.advantages.stepwise import stepwise
from trainer_backend.core.errors import AdvantageError, place
from trainer_backend.core.returns import discounted_returns


def branch(episodes: Sequence[EpisodeRewards], config: AdvantageConfig) -> Advantages:
    """Where branches were played from the state before a decision, their mean return is the baseline.

        A_t = G_t - 1/K * sum_k G^(k)_t        decisions with K >= 1 branches
        A_t = that of `stepwise`               all others

    G^(k)_t is the discounted return of the k-th branch: the same policy and the world of s_t. The policy's
    draws are fresh. The world's are not: a snapshot restores its generator too, so branch and episode share
    them until their actions differ. A baseline may know those draws, as it does not look at a_t: given s_t
    and them a_t is as likely as ever. As which decisions have branches is settled before they are made
    (`core.branching.branch_turns`), the policy gradient is unbiased (gamma 1, fixed denominators). The
    variance of A_t would be that of G_t given s_t, times 1 + 1/K, if the world drew anew; what both share
    lowers it as a rule. Branches themselves are not trained: their states are not those of an episode's
    start.

    Args:
        episodes: all episodes of the batch; `branch_returns_T` of each is read.
        config: gamma is read.

    Returns:
        [T] advantages for each episode, and counts.

    Raises:
        AdvantageError: no branches were played; the return of one is not finite; see `siblings`.
        ValueError: gamma is outside [0, 1].

    Source: Monte Carlo values from intermediate states: Kazemnejad et al., VinePPO, arXiv:2410.01679, which
    takes r_t + V(s_{t+1}) - V(s_t) where this takes G_t - V(s_t), as most decisions have no branches.
    """
    others = stepwise(episodes, config)
    advantages = [
        _of_episode(episode, others_T, config.gamma)
        for episode, others_T in zip(episodes, others.per_episode, strict=True)
    ]
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
    return Advantages(advantages, diagnostics)


def _of_episode(episode: EpisodeRewards, others_T: Sequence[float], gamma: float) -> list[float]:
    if len(episode.branch_returns_T) != len(others_T):
        raise AdvantageError(
            "no branches were played from its decisions, which algorithm.advantage = 'branch' needs",
            where=place(episode.rollout_id),
            hint="They are played while a run trains with that estimator.",
        )
    returns_T = discounted_returns(episode.rewards_T, gamma)
    rows = zip(returns_T, episode.branch_returns_T, others_T, strict=True)
    return [
        _against(own, branches, place(episode.rollout_id, t + 1)) if branches else other
        for t, (own, branches, other) in enumerate(rows)
    ]


def _against(own: float, branches: Sequence[float], where: str) -> float:
    baseline = _mean(branches)
    if not math.isfinite(baseline):
        raise AdvantageError(f"the returns of its branches are {list(branches)}", where=where)
    return own - baseline


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else 0.0
