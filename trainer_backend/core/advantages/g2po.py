"""G2PO: compares the TD errors of decisions within their state and within the group."""

from collections.abc import Sequence

from trainer_backend.core.advantages.derivation import AT_STATE, BY_MEANS, ON_GRAPH, TD_ERROR, two_levels
from trainer_backend.core.advantages.episodes import Advantages, EpisodeRewards, EstimatorPlug
from trainer_backend.core.advantages.levels import GraphKeys, summed_levels
from trainer_backend.core.advantages.state_graph import (
    Columns,
    StateGraph,
    relative_at,
    return_sizes,
    state_graph,
)


def g2po(episodes: Sequence[EpisodeRewards], keys: GraphKeys) -> Advantages:
    """Compare scores of whole episodes, and TD errors of decisions on the graph of the group's states.

        A_{i,t} = A_E(i) + w * (A_N(i, t) + A_G(i, t)),     w = step_advantage_w, A_E as in `gigpo`
        V(s)    = mean of G over the group's decisions that were made in s
        d_{i,t} = r_{i,t} + gamma * V(s_{i,t+1}) - V(s_{i,t}),      V = 0 after the last decision
        A_N     = (d - mean d) / Fnorm,     over the group's decisions in the same state ("node-centric")
        A_G     = (d - mean d) / Fnorm,     over all decisions of the group ("edge-centric")

    G is the return-to-go, and Fnorm is as in `gigpo`. A_N shows which decision was best in its state, and A_G
    shows which decisions of the graph changed the value most. Decisions of two groups are never in the same
    state, even if their state keys are equal. A_N is 0 for the only decision in a state. If only start states
    repeat, d is 0 for all but the first decisions, because V of any other state is the return of its only
    decision. Lone episodes get 0, and so do values that are all equal.

    Source: Wang et al., G2PO, arXiv:2606.22995, from its authors' code (Nala-YN/G2PO, g2po/core_g2po.py). We
    know the paper's equations only from other texts. The paper differs as follows:
    - it rewards only the end of an episode, and discounts V by one more decision: gamma^(T - j + 1) R;
    - its d is V(s') - V(s), without gamma, and R - V(s) for the last decision; at gamma 1, its d equals ours;
    - its A_N compares V(s') minus a penalty for invalid actions; if r contains the penalty, comparing d
      within one state has the same result;
    - it adds 1e-6 to the std, and its A_E counts a score once per decision (here: episode_baseline = "step").
    """
    graph = state_graph(episodes, "g2po")
    of_steps_D, parts_D = _compare_steps(episodes, graph, keys)
    weights = 1.0, keys.step_advantage_w
    return summed_levels(episodes, keys, of_steps_D, parts_D, graph.sizes, weights=weights, scale=keys.scale)


def _compare_steps(
    episodes: Sequence[EpisodeRewards], graph: StateGraph, keys: GraphKeys
) -> tuple[list[float], Columns]:
    """Return the [D] sums A_N + A_G of all decisions of the batch, and their parts."""
    td_parts_D = graph.td_parts(episodes, keys.gamma)
    td_errors_D, sizes_D = td_parts_D["td_error"], graph.td_sizes(return_sizes(episodes, keys.gamma))
    of_nodes_D, parts_D = relative_at(graph.anchors, td_errors_D, keys.scale, sizes_D)
    of_edges_D, of_graph_D = graph.relative(td_errors_D, keys.scale, sizes_D)
    of_steps_D = [node + edge for node, edge in zip(of_nodes_D, of_edges_D, strict=True)]
    return of_steps_D, {**td_parts_D, **parts_D, **of_graph_D}


PLUGS = {
    "g2po": EstimatorPlug(
        g2po,
        GraphKeys,
        two_levels(
            (
                TD_ERROR,
                "step_advantage = (td_error - baseline) / scale + (td_error - graph_baseline) / graph_scale",
            ),
            ("baseline", AT_STATE),
            *ON_GRAPH,
        ),
        needs_state_keys=True,
        divides_by_std=True,
        bias=BY_MEANS,
    )
}
