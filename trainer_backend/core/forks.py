"""Trained continuations: from which decisions they start, and how they are compared. Pure."""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from trainer_backend.core.advantages.branch import branch_turns
from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, siblings
from trainer_backend.core.advantages.spread import leave_one_out
from trainer_backend.core.critic import ByToken
from trainer_backend.core.keys import Table
from trainer_backend.core.rewards import discounted_returns, discounted_sizes


class ForkKeys(Table):
    """Keys of trained continuations."""

    train_branches: bool = False
    """continue finished episodes from some of their decisions, and train what follows, with any estimator:
    branches_per_episode decisions per episode, branch_rollouts continuations of each (docs/credit.md)"""
    fork_rule: str = "uniform"
    """chooses the decisions to continue from: uniform by seed alone, surprise in proportion to -log p of what
    was sampled there, critic in proportion to the size of the critic's TD error"""


@dataclass(frozen=True, slots=True)
class Parent:
    """The data of a finished episode of T decisions that a fork rule may read."""

    first: int
    """The first turn that may be forked (from 1)."""
    max_decisions: int
    """The most decisions that the episode may take."""
    surprise_T: Sequence[float]
    """[T] -log p of a decision's tokens under the sampler, in nats."""
    td_errors_T: Sequence[float] = ()
    """[T] r_t + gamma V(s_{t+1}) - V(s_t); empty if the rule reads none."""


# (parent, number of forks, seed) -> turns in order.
Choose = Callable[[Parent, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ForkPlug:
    """A fork rule that a job can name."""

    choose: Choose
    reads_samples: bool = True
    """Whether it reads what the parent sampled. The parent is then not a fair sample of what follows the
    fork, and continuations are compared only with each other."""
    needs_values: bool = False
    """Whether it reads a critic's values."""


def uniform(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns by seed alone, among all possible ones, and drop those that the episode did not reach."""
    turns = branch_turns(seed, count=count, max_decisions=parent.max_decisions, first=parent.first)
    return tuple(turn for turn in turns if turn <= len(parent.surprise_T))


def surprise(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns in proportion to -log p of the sampled tokens: where the policy was uncertain.

    Turns are drawn, because the largest values would always fork the same uncertain situations. The rule
    reads only sampled log-probs, which every inference server returns.
    """
    return _draw(parent.surprise_T, parent.first, count, seed)


def critic(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns in proportion to the size of the TD error: where the critic's prediction was wrong."""
    return _draw([abs(error) for error in parent.td_errors_T], parent.first, count, seed)


def _draw(weights_T: Sequence[float], first: int, count: int, seed: int) -> tuple[int, ...]:
    """Draw at most `count` turns without replacement, in proportion to their weights; weight 0: never.

    Source: Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006: the smallest of
    -log(u) / w.
    """
    draw = random.Random(seed)
    keys = [
        (-math.log(1.0 - draw.random()) / weight if weight > 0.0 else math.inf, turn)
        for turn, weight in enumerate(weights_T, start=1)
    ]
    reached = sorted(key for key in keys[first - 1 :] if key[0] < math.inf)
    return tuple(sorted(turn for _, turn in reached[:count]))


FORK_RULES = {
    "uniform": ForkPlug(uniform, reads_samples=False),
    "surprise": ForkPlug(surprise),
    "critic": ForkPlug(critic, needs_values=True),
}


def cut_rest(episode: EpisodeRewards, turn: int, group_id: str) -> EpisodeRewards:
    """Cut an episode to the decisions from `turn` on, as a sibling of the continuations from there."""
    t, tokens = turn - 1, episode.token_values
    rest_T = episode.rewards_T[t:]
    return replace(
        episode,
        group_id=group_id,
        rewards_T=rest_T,
        state_keys_T=episode.state_keys_T[t:],
        texts_T=episode.texts_T[t:],
        values_T=episode.values_T[t:],
        token_values=None if tokens is None else ByToken(tokens.rows_T[t:]),
        branch_returns_T=[()] * len(rest_T) if episode.branch_returns_T else (),
    )


def compare_at_forks(
    found: Advantages, episodes: Sequence[EpisodeRewards], rests: Sequence[EpisodeRewards], gamma: float
) -> Advantages:
    """Replace the advantages of continuations' first decisions by leave-one-out within their fork.

        A_0 = G_0 - mean of the others' G_0      over the fork's other members of `episodes` and `rests`

    `episodes` are continuations, `rests` their parents from the fork on (`cut_rest`); all start in one state.
    `found` has the advantages of `episodes`, then of `rests`; the result drops the latter. If alone, A_0 = 0.
    """
    every = [*episodes, *rests]
    returns = [discounted_returns(episode.rewards_T, gamma)[0] for episode in every]
    sizes = [discounted_sizes(episode.rewards_T, gamma)[0] for episode in every]
    per_episode = [list(row_T) for row_T in found.per_episode[: len(episodes)]]
    by_token = found.per_token
    per_token = None if by_token is None else [list(item.rows_T) for item in by_token[: len(episodes)]]
    names = {*found.parts, "return", "baseline", "continuations"}
    parts: dict[str, list[list[float | None]]] = {
        name: [
            [None] * len(row_T) if name not in found.parts else [None, *found.parts[name][i][1:]]
            for i, row_T in enumerate(per_episode)
        ]
        for name in names
    }
    for members in siblings(every).values():
        compared = leave_one_out([returns[i] for i in members], size=max(sizes[i] for i in members))
        for i, advantage, baseline in zip(members, compared.advantages, compared.baselines, strict=True):
            if i >= len(episodes):
                continue
            per_episode[i][0] = advantage
            if per_token is not None:
                per_token[i][0] = [advantage] * len(per_token[i][0])
            numbers = {"return": returns[i], "baseline": baseline, "continuations": len(members) - 1.0}
            for name, number in numbers.items():
                parts[name][i][0] = number
    tokens = None if per_token is None else [ByToken(rows_T) for rows_T in per_token]
    return Advantages(per_episode, found.diagnostics, parts, tokens)
