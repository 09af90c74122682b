"""GraphGPO: compares the decisions made in a state by the distance to the goal after each of them."""

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
    """graphgpo: discount per decision on the path from a state to the goal"""
    goal_score: float | None = None
    """graphgpo: an episode with at least this score reached the goal; absent: the best score of its group"""


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
        D(s)    = 1 + min D(s') over the states s' to which decisions of the group led from s

    D is the distance from a state to the goal, and C is the closeness to the goal after a decision. An
    episode reached the goal if its score is at least goal_score. Without that key, an episode reached the
    goal if its score is the best of the group and the group's scores differ. The last decision of such an
    episode leads to the goal, where D = 0. For a state without a path to the goal, and for the end of an
    episode that missed it, D is 1 more than the largest D of a state with a path. If a limit cut short an
    episode that missed the goal, the state after its last decision is unknown, so this decision is not
    compared and has A_S = 0.

    A_S uses rewards only to decide which episodes reached the goal. A good decision of a failed episode
    therefore gets as much A_S as in the best episode. A_S is 0 for the only decision in a state, in a group
    that did not reach the goal, for a lone episode, and where all compared numbers are equal. A distance is a
    number of decisions, so all decisions cost the same. Metrics count the groups that reached the goal, and
    contain the share of decisions from whose state a path leads to the goal.

    Source: Cheng et al., GraphGPO, arXiv:2605.26684, from a copy of its authors' code (verl-agent,
    recipe/GraphGPO/core_graph.py). We know the paper's equations only from other texts. The paper differs as
    follows:
    - its environment reports success, and C has an additional factor 10, which division by a std removes;
    - its equation is C = 10 omega^(D + 1), where omega is distance_discount; its code has 10 omega^D, as
      here;
    - the last decision of its failed episodes leads to the observation after it, which is not stored here;
    - it adds 1e-6 to the std, and its A_E counts a score once per decision (here: episode_baseline = "step").
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

    `goals` contains the decisions that led to the goal, `unknown` the decisions after which the state is
    unknown.
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
    """Return, by state, the number of decisions from the state to the goal.

    A backward breadth-first search finds the distances. States without a path to the goal have no entry.
    """
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
