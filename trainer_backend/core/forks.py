"""Continuations that are trained: what they play on from, and what they are compared with. Pure."""

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
    """Of continuations that are trained."""

    train_branches: bool = False
    """play on from decisions of finished episodes and train what follows, with any estimator:
    branches_per_episode decisions each, branch_rollouts continuations of each (docs/credit.md)"""
    fork_rule: str = "uniform"
    """chooses these decisions: uniform by seed alone, surprise in proportion to -log p of what was sampled
    there, critic in proportion to the size of the critic's TD error"""


@dataclass(frozen=True, slots=True)
class Parent:
    """What a rule may read of a finished episode: its T decisions, and what is stored with them."""

    first: int
    """The first turn that may be forked."""
    max_decisions: int
    """The most that its episode may take."""
    surprise_T: Sequence[float]
    """[T] -log p of all tokens of a decision, in nats, as they were sampled."""
    td_errors_T: Sequence[float] = ()
    """[T] r_t + gamma V(s_{t+1}) - V(s_t); empty where the rule reads none."""


# From the parent, the number of forks and a seed to turns in order.
Choose = Callable[[Parent, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ForkPlug:
    """A rule on the plug board."""

    choose: Choose
    reads_samples: bool = True
    """Whether it looks at what was sampled: the parent is then no fair sample of what follows the fork, and
    its continuations are compared with each other alone."""
    needs_values: bool = False
    """Whether it reads a critic's values."""


def uniform(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Turns by seed alone, over all that the episode could have; those that it did not reach are dropped."""
    turns = branch_turns(seed, count=count, max_decisions=parent.max_decisions, first=parent.first)
    return tuple(turn for turn in turns if turn <= len(parent.surprise_T))


def surprise(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Turns in proportion to -log p of what was sampled there: where the policy could have done otherwise.

    Drawn, and not the largest ones: a place where the policy always wavers would be all that is forked. It
    reads sampled log-probs alone, which every inference server returns.
    """
    return _draw(parent.surprise_T, parent.first, count, seed)


def critic(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Turns in proportion to the size of the TD error: where the critic was wrong about what came."""
    return _draw([abs(error) for error in parent.td_errors_T], parent.first, count, seed)


def _draw(weights_T: Sequence[float], first: int, count: int, seed: int) -> tuple[int, ...]:
    """At most `count` turns without replacement, each drawn in proportion to its weight; none of weight 0.

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
    """The episode from the decision `turn` on, as a sibling of those that play on from there."""
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
    """An estimator's advantages of continuations, with leave-one-out at their first decisions.

        A_0 = G_0 - mean of the others' G_0      others: of the fork; the parent's rest where it is in `rests`

    Their states are the same, and nothing but what they sampled tells them apart. A lone one has 0. `found`
    is of `episodes` and then `rests`; what is returned is of `episodes` alone.
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
