"""Trained continuations of episodes: the decisions that they start from, and their advantages. Pure.

The continued episode is the *parent*. All continuations from one of its decisions are a *fork*.
"""

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
    """Job keys of trained continuations."""

    train_branches: bool = False
    """continue each finished episode from branches_per_episode of its decisions, branch_rollouts times each,
    and train the continuations, with any estimator (docs/credit.md)"""
    fork_rule: str = "uniform"
    """how the decisions to continue from are drawn: uniform from the seed alone, surprise in proportion to
    -log p of their sampled tokens, critic in proportion to the critic's absolute TD error"""


@dataclass(frozen=True, slots=True)
class Parent:
    """What a fork rule may read about a finished episode of T decisions."""

    first: int
    """The first turn (from 1) from which continuations may start."""
    max_decisions: int
    """The maximum number of decisions of the episode."""
    surprise_T: Sequence[float]
    """[T] -log p of the sampled tokens of each decision under the sampler, in nats."""
    td_errors_T: Sequence[float] = ()
    """[T] TD errors r_t + gamma V(s_{t+1}) - V(s_t); empty if the rule does not read them."""


# (parent, maximum number of turns, seed) -> sorted turns from which continuations start.
Choose = Callable[[Parent, int, int], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class ForkPlug:
    """A fork rule that a job can select by name. The rule chooses the turns that continuations start from."""

    choose: Choose
    reads_samples: bool = True
    """Whether the rule reads what the parent sampled. If it does, the parent's part after the fork is a
    biased sample, so continuations are compared only with each other, not with the parent."""
    needs_values: bool = False
    """Whether the rule reads a critic's values."""


def uniform(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns uniformly up to `parent.max_decisions`, then drop those that the parent did not reach."""
    turns = branch_turns(seed, count=count, max_decisions=parent.max_decisions, first=parent.first)
    return tuple(turn for turn in turns if turn <= len(parent.surprise_T))


def surprise(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns in proportion to -log p of their sampled tokens: where it is high, the policy was uncertain.

    Turns are drawn at random, because taking those with the largest -log p would always continue from the
    same situations. The rule needs log-probs of sampled tokens only, which every inference server returns.
    """
    return _draw(parent.surprise_T, parent.first, count, seed)


def critic(parent: Parent, count: int, seed: int) -> tuple[int, ...]:
    """Draw turns in proportion to the absolute TD error: where it is high, the critic was wrong."""
    return _draw([abs(error) for error in parent.td_errors_T], parent.first, count, seed)


def _draw(weights_T: Sequence[float], first: int, count: int, seed: int) -> tuple[int, ...]:
    """Draw at most `count` turns without replacement, in proportion to their weights w; return them sorted.

    The drawn turns are those with the smallest -log(u) / w, where u is uniform in (0, 1]. A turn of weight 0
    is never drawn.

    Source: Efraimidis & Spirakis, Weighted random sampling with a reservoir, 2006.
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
    """Return the part of an episode from `turn` on, as a member of the group of continuations from `turn`."""
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
    """Replace the advantage of each continuation's first decision by a leave-one-out advantage.

        A_0 = G_0 - mean G_0 of the other members of its group

    G_0 is the return from the first decision. `episodes` are continuations; `rests` are the parts of their
    parents after the forks (`cut_rest`), and may be empty. All members of a group start in the same state. If
    a group has a single member, A_0 is 0. `found` contains the advantages of `episodes`, then those of
    `rests`; the result contains only the advantages of `episodes`.
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
