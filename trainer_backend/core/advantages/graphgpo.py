"""GraphGPO: compares the decisions of a state by their distance to the goal afterwards."""

from collections import deque
from collections.abc import Sequence, Set

from pydantic import Field

from shared_schemas.rounding import TOLERANCE, has_spread
from trainer_backend.core.advantages.derivation import AT_STATE, BY_STATE, two_levels
from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, EstimatorPlug, siblings
from trainer_backend.core.advantages.levels import GraphKeys, summed_levels
from trainer_backend.core.advantages.state_graph import Columns, StateGraph, relative_at, state_graph
from trainer_backend.core.metric import Metric, Row


class GraphgpoKeys(GraphKeys):
    """Keys of `graphgpo`."""

    distance_discount: float = Field(default=0.1, gt=0, lt=1)
    """graphgpo: discount for each decision between a state and the goal"""
    goal_score: float | None = None
    """graphgpo: least score of an episode that reached the goal; absent: the group's best"""


METRICS = (
    Row(
        Metric("graph/groups_with_goal", "groups of two or more where the goal was reached"),
        Metric("graph/path_frac", "share of decisions whose state has a path to the goal"),
        when="only with `graphgpo`",
    ),
)


def graphgpo(episodes: Sequence[EpisodeRewards], keys: GraphgpoKeys) -> Advantages:
    """Compare scores of whole episodes, and distances to the goal on the graph of the group's states.

        A_{i,t} = A_E(i) + w * A_S(i, t),       w = step_advantage_w, A_E as in `gigpo`
        A_S     = (C - mean C) / Fnorm,         over the group's decisions in the same state
        C_{i,t} = distance_discount^D(s_{i,t+1})
        D(s)    = 1 + min D(s') over the states s' that a decision of the group led to from s

    An episode reached the goal if its score is at least goal_score; without that key, if its score is the
    group's best and scores differ. The goal, D = 0, follows the last decision of such an episode. A state
    without a path to the goal, and the end of an episode that missed it, are one decision farther than the
    farthest state with a path. If a limit cut short an episode that missed the goal, it is unknown where its
    last decision led: that decision has A_S = 0 and is not compared.

    Rewards only decide which episodes reached the goal, so a good decision of a failed episode gets as much
    credit as in the best episode. A_S is 0 in a state with a single decision, in a group without a goal, for
    a lone episode, and without spread. A distance is a number of decisions, so all decisions cost the same.
    Metrics count the groups that reached the goal, and the share of decisions with a path to it.

    Source: Cheng et al., GraphGPO, arXiv:2605.26684, from a copy of its authors' code (verl-agent,
    recipe/GraphGPO/core_graph.py); its equations were read second hand. Differences of the paper:
    - the environment reports success, which scales C by 10; a std removes the factor;
    - its equation has C = 10 omega^(D + 1), its code 10 omega^D, as here;
    - the last decision of a failed episode leads to the observation after it, which is not stored here;
    - 1e-6 is added to the std; A_E counts a score once for each decision (here: episode_baseline = "step").
    """
    groups = siblings(episodes)
    graph = state_graph(episodes, "graphgpo")
    ends = [d for d, after in enumerate(graph.next_D) if after is None]
    goals = {
        ends[index]
        for members in groups.values()
        if len(members) > 1
        for index in _find_successes(episodes, members, keys.goal_score)
    }
    unknown = {end for end, episode in zip(ends, episodes, strict=True) if episode.truncated} - goals
    of_steps_D, parts_D, paths = _compare_steps(graph, goals, unknown, keys)
    met = {
        "graph/groups_with_goal": float(sum(not goals.isdisjoint(group) for group in graph.groups)),
        "graph/path_frac": paths / max(len(graph.next_D), 1),
    }
    met, weights = graph.sizes | met, (1.0, keys.step_advantage_w)
    return summed_levels(episodes, keys, of_steps_D, parts_D, met, weights=weights, scale=keys.scale)


def _find_successes(
    episodes: Sequence[EpisodeRewards], members: Sequence[int], goal_score: float | None
) -> list[int]:
    scores_G = [episodes[index].score for index in members]
    if goal_score is None:
        size = max(episodes[index].score_size for index in members)
        if not has_spread(scores_G, size=size):
            return []
        goal_score = max(scores_G) - TOLERANCE * size
    return [index for index, score in zip(members, scores_G, strict=True) if score >= goal_score]


def _compare_steps(
    graph: StateGraph, goals: Set[int], unknown: Set[int], keys: GraphgpoKeys
) -> tuple[list[float], Columns, int]:
    """Return [D] A_S, its parts, and the number of decisions with a path to the goal.

    `goals` are the decisions that led to the goal. Where the decisions of `unknown` led is not known.
    """
    state_D = graph.state_D
    distances_D: list[float | None] = [None] * len(graph.next_D)
    next_D: list[float | None] = [None] * len(graph.next_D)
    paths = 0
    for group in graph.groups:
        distances_S = _distances(graph, state_D, group, goals)
        if not distances_S:
            continue
        farther = max(distances_S.values()) + 1.0
        paths += sum(state_D[d] in distances_S for d in group)
        for d in group:
            distances_D[d] = distances_S.get(state_D[d], farther)
            after = graph.next_D[d]
            if after is not None:
                next_D[d] = distances_S.get(state_D[after], farther)
            elif d not in unknown:
                next_D[d] = 0.0 if d in goals else farther
    closeness_D = [None if far is None else keys.distance_discount**far for far in next_D]
    compared = [[d for d in anchor if next_D[d] is not None] for anchor in graph.anchors]
    known_D = [close or 0.0 for close in closeness_D]
    of_steps_D, of_nodes_D = relative_at(compared, known_D, keys.scale, known_D)
    distances = {"distance": distances_D, "next_distance": next_D, "closeness": closeness_D}
    return of_steps_D, {**of_nodes_D, **distances}, paths


def _distances(
    graph: StateGraph, state_D: Sequence[int], group: Sequence[int], goals: Set[int]
) -> dict[int, float]:
    """Count decisions from the states of a group to the goal, by backward breadth-first search."""
    before: dict[int, list[int]] = {}
    for d in group:
        after = graph.next_D[d]
        if after is not None:
            before.setdefault(state_D[after], []).append(state_D[d])
    distances_S = {state_D[d]: 1.0 for d in group if d in goals}
    frontier = deque(distances_S)
    while frontier:
        state = frontier.popleft()
        for earlier in before.get(state, ()):
            if earlier not in distances_S:
                distances_S[earlier] = distances_S[state] + 1.0
                frontier.append(earlier)
    return distances_S


PLUGS = {
    "graphgpo": EstimatorPlug(
        graphgpo,
        GraphgpoKeys,
        two_levels(
            ["step_advantage = (closeness - baseline) / scale"],
            ("baseline", AT_STATE),
            ("closeness", "{next_distance} decision[s] from the goal"),
        ),
        needs_state_keys=True,
        divides_by_std=True,
        bias=f"{BY_STATE}, by distances and not by what was earned",
    )
}
