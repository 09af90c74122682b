"""GAGPO: generalised advantages whose values are mean returns of states, without a critic."""

from collections.abc import Sequence
from itertools import chain

from trainer_backend.core.advantages.derivation import BY_MEANS, LATER, ON_GRAPH, TD_ERROR, Derivation
from trainer_backend.core.advantages.episodes import (
    Advantages,
    EpisodeRewards,
    EstimatorPlug,
    group_counts,
    siblings,
)
from trainer_backend.core.advantages.gae import LambdaKeys, generalised_advantages
from trainer_backend.core.advantages.levels import StateKeys, by_episode
from trainer_backend.core.advantages.state_graph import return_sizes, state_graph


class GagpoKeys(LambdaKeys, StateKeys):
    """Keys of `gagpo`."""


def gagpo(episodes: Sequence[EpisodeRewards], keys: GagpoKeys) -> Advantages:
    """Compute `gae` with the mean return of a state as its value, normalised over the group.

        A_{i,t} = (B_{i,t} - mean B) / Fnorm,       over all decisions of the group
        B_{i,t} = d_{i,t} + gamma * lambda * B_{i,t+1},                  B = 0 after the last decision
        d_{i,t} = r_{i,t} + gamma * V(s_{i,t+1}) - V(s_{i,t}),           V = 0 after the last decision
        V(s)    = mean of G over the group's decisions that were made in s

    G is the return-to-go, lambda is gae_lambda, and Fnorm is as in `gigpo`. At lambda 1, B is G - V, which is
    A_S of `gigpo` with fnorm "one". Below 1, B also depends on the returns of other episodes from the next
    state. No score of a whole episode is added. Decisions of two groups are never in the same state, even if
    their state keys are equal. If only start states repeat, d is 0 for all but the first decisions,
    whatever lambda is. Lone episodes get 0, and so do groups without spread.

    Source: Zhu et al., GAGPO, arXiv:2605.13217. Only its abstract and summaries were read: neither its text
    nor its authors' code was found. We read "group-wise normalisation" as normalisation over all decisions of
    the group (one task), not over the decisions of one state. The paper differs as follows:
    - it rewards only the end of an episode;
    - it may add an epsilon to the std; this code adds none;
    - it uses one probability ratio per action, for which a job must set algorithm.ratio_level = "decision".
    """
    graph = state_graph(episodes, "gagpo")
    td_parts_D = graph.td_parts(episodes, keys.gamma)
    raw = [
        generalised_advantages(episode.rewards_T, values_T, gamma=keys.gamma, gae_lambda=keys.gae_lambda)
        for episode, values_T in zip(episodes, by_episode(td_parts_D["state_value"], episodes), strict=True)
    ]
    raw_D = list(chain.from_iterable(raw))
    advantages_D, of_graph_D = graph.relative(raw_D, keys.scale, return_sizes(episodes, keys.gamma))
    later_D = [keys.gamma * keys.gae_lambda * value for value in graph.after(raw_D)]
    parts_D = {**td_parts_D, "compared": graph.others_D, "later": later_D, **of_graph_D}
    parts = {name: by_episode(numbers_D, episodes) for name, numbers_D in parts_D.items()}
    advantages = by_episode(advantages_D, episodes)
    counts = graph.sizes | group_counts(siblings(episodes), advantages)
    return Advantages(advantages, counts, parts)


PLUGS = {
    "gagpo": EstimatorPlug(
        gagpo,
        GagpoKeys,
        Derivation(
            (TD_ERROR, "advantage = (td_error + later - graph_baseline) / graph_scale"),
            (LATER, *ON_GRAPH),
        ),
        needs_state_keys=True,
        divides_by_std=True,
        bias=BY_MEANS,
    )
}
