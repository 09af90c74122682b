"""The graph of a group's states: nodes are states in which decisions were made, edges are decisions.

A decision is identified by its index in [D], the list of all decisions of the batch, episode after episode.
"""

import math
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate, chain

from trainer_backend.core.advantages.episodes import EpisodeRewards, refuse_incomplete, siblings
from trainer_backend.core.advantages.spread import Scale, relative
from trainer_backend.core.metric import Metric, Row
from trainer_backend.core.rewards import discounted_returns, discounted_sizes

# By the name of a part, its [D] values for all decisions of the batch; None if a decision lacks the part.
Columns = Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class StateGraph:
    """Contains the state graphs of all groups of a batch.

    Decisions of two groups are never in the same state, even if their state keys are equal. In a lone
    episode, each decision has a state of its own, because there are no siblings to compare with.
    """

    anchors: Sequence[Sequence[int]]
    """For each state, the indices of the decisions that were made in it."""
    next_D: Sequence[int | None]
    """[D] index of the episode's next decision; None for the last decision of an episode."""
    starts: Set[int]
    """Index of the first decision of each episode."""
    groups: Sequence[Sequence[int]]
    """For each group of two episodes or more, the indices of its decisions."""

    @property
    def state_D(self) -> list[int]:
        """The [D] state of each decision, as an index of `anchors`."""
        state_D = [0] * len(self.next_D)
        for state, anchor in enumerate(self.anchors):
            for d in anchor:
                state_D[d] = state
        return state_D

    @property
    def others_D(self) -> list[float]:
        """For each decision, the number of other decisions in the same state."""
        return [len(self.anchors[state]) - 1.0 for state in self.state_D]

    @property
    def sizes(self) -> dict[str, float]:
        """The metrics of `anchor_sizes` for this graph."""
        return anchor_sizes(self.anchors, self.starts)

    def relative(
        self, values_D: Sequence[float], scale: Scale, sizes_D: Sequence[float]
    ) -> tuple[list[float], dict[str, list[float]]]:
        """Compare each of the [D] values with all values of its group; return [D] advantages and parts."""
        advantages_D, parts_D = relative_at(self.groups, values_D, scale, sizes_D)
        return advantages_D, {"graph_baseline": parts_D["baseline"], "graph_scale": parts_D["scale"]}

    def means(self, values_D: Sequence[float]) -> list[float]:
        """Return, for each decision, the mean value of all decisions in its state."""
        return self._by_state(values_D, lambda values: math.fsum(values) / len(values))

    def _by_state(self, values_D: Sequence[float], reduce: Callable[[Sequence[float]], float]) -> list[float]:
        """Return, for each decision, one number: `reduce` of the values of all decisions in its state."""
        reduced_D = [0.0] * len(values_D)
        for anchor in self.anchors:
            number = reduce([values_D[d] for d in anchor])
            for d in anchor:
                reduced_D[d] = number
        return reduced_D

    def td_sizes(self, sizes_D: Sequence[float]) -> list[float]:
        """Return the [D] magnitudes against which rounding errors of TD errors are judged.

        `sizes_D` contains the same magnitudes for the returns.
        """
        values_D = self._by_state(sizes_D, max)
        return [max(pair) for pair in zip(values_D, self.after(values_D), strict=True)]

    def after(self, values_D: Sequence[float]) -> list[float]:
        """Return, for each decision, the value of the episode's next decision, or 0 if it is the last one."""
        return [0.0 if after is None else values_D[after] for after in self.next_D]

    def td_parts(self, episodes: Sequence[EpisodeRewards], gamma: float) -> dict[str, list[float]]:
        """Compute the [D] TD errors r + gamma * V(s') - V(s) and their parts.

        V(s) is the mean return of the decisions that were made in the state s.
        """
        values_D = self.means(returns_to_go(episodes, gamma))
        next_D = self.after(values_D)
        rewards_D = chain.from_iterable(episode.rewards_T for episode in episodes)
        columns = zip(rewards_D, next_D, values_D, strict=True)
        td_errors_D = [reward + gamma * after - value for reward, after, value in columns]
        discount_D = [gamma] * len(values_D)
        return {
            "state_value": values_D,
            "next_value": next_D,
            "discount": discount_D,
            "td_error": td_errors_D,
        }


def state_graph(episodes: Sequence[EpisodeRewards], reader: str) -> StateGraph:
    """Build the graphs of the batch from the episodes' state keys; errors name the estimator `reader`."""
    groups = siblings(episodes)
    refuse_missing_keys(episodes, reader)
    # The indices of each episode's decisions, and for each decision the index of the next one.
    decisions, next_D = list[range](), list[int | None]()
    for episode in episodes:
        first, end = len(next_D), len(next_D) + len(episode.rewards_T)
        decisions.append(range(first, end))
        next_D += [*range(first + 1, end), None]
    lone = {d for members in groups.values() if len(members) == 1 for d in decisions[members[0]]}
    met = anchors(episodes)
    apart = [anchor for anchor in met if anchor[0] not in lone] + [[d] for d in sorted(lone)]
    together = [
        list(chain.from_iterable(decisions[index] for index in members))
        for members in groups.values()
        if len(members) > 1
    ]
    return StateGraph(apart, next_D, first_decisions(episodes), together)


def anchors(episodes: Sequence[EpisodeRewards], depth: int = 0) -> list[list[int]]:
    """Return lists of decisions with the same group, the same state, and the same `depth` states before it.

    A decision with fewer than `depth` earlier states is in no list.
    """
    groups: dict[str, dict[object, list[int]]] = {}
    start = 0
    for episode in episodes:
        of_group, keys = groups.setdefault(episode.group_id, {}), episode.state_keys_T
        for t in range(depth, len(keys)):
            state = keys[t] if depth == 0 else tuple(keys[t - depth : t + 1])
            of_group.setdefault(state, []).append(start + t)
        start += len(keys)
    return [decisions for of_group in groups.values() for decisions in of_group.values()]


def relative_at(
    anchors: Sequence[Sequence[int]], values_D: Sequence[float], scale: Scale, sizes_D: Sequence[float]
) -> tuple[list[float], dict[str, list[float]]]:
    """Compare each of the [D] values with the values in the same state; return [D] advantages and parts.

    `anchors` contains the decisions of each state. A decision that is alone in its state is its own baseline,
    so its advantage is 0. `sizes_D` contains, for each value, the `size` of `relative`.
    """
    count = len(values_D)
    advantages_D, baselines_D = [0.0] * count, list(values_D)
    compared_D, scale_D = [0.0] * count, [1.0] * count
    for decisions in anchors:
        if len(decisions) > 1:
            size = max([sizes_D[d] for d in decisions])
            comparison = relative([values_D[d] for d in decisions], scale, size=size)
            columns = (comparison.advantages, comparison.baselines)
            others, divisor = len(decisions) - 1.0, comparison.scale
            for d, advantage, baseline in zip(decisions, *columns, strict=True):
                advantages_D[d], baselines_D[d] = advantage, baseline
                compared_D[d], scale_D[d] = others, divisor
    return advantages_D, {"baseline": baselines_D, "compared": compared_D, "scale": scale_D}


def returns_to_go(episodes: Sequence[EpisodeRewards], gamma: float) -> list[float]:
    """Compute the [D] discounted returns-to-go of all decisions."""
    return list(chain.from_iterable(discounted_returns(episode.rewards_T, gamma) for episode in episodes))


def return_sizes(episodes: Sequence[EpisodeRewards], gamma: float) -> list[float]:
    """Compute the [D] discounted sums of |r_t|, against which rounding errors of returns are judged."""
    return list(chain.from_iterable(discounted_sizes(episode.rewards_T, gamma) for episode in episodes))


METRICS = (
    Row(
        Metric("anchors/groups", "distinct states"),
        Metric("anchors/mean_size", "decisions in one state, mean", "anchors", "mean size"),
        Metric("anchors/max_size", "the most"),
        Metric("anchors/singleton_frac", "share of decisions that are alone in their state", "anchors",
               "share alone"),
        when="only with estimators that compare states (`gigpo`, `g2po`, `graphgpo`, `gagpo`; with "
        "`gigpo_soft` of equal texts)",
    ),
    Row(
        Metric("anchors/met_after_start_frac", "share of decisions after the first of their episode whose "
               "state was met twice"),
        when="only with those",
        note="0: states never repeat",
    ),
)  # fmt: skip


def anchor_sizes(anchors: Sequence[Sequence[int]], starts: Set[int]) -> dict[str, float]:
    """Compute metrics of how often states repeat.

    `anchors/met_after_start_frac` leaves out `starts`, the first decisions of all episodes, because siblings
    share their first state.
    """
    sizes = [len(decisions) for decisions in anchors]
    decisions, alone = sum(sizes), [anchor[0] for anchor in anchors if len(anchor) == 1]
    later = decisions - len(starts)
    alone_later = sum(d not in starts for d in alone)
    return {
        "anchors/groups": float(len(sizes)),
        "anchors/singleton_frac": len(alone) / max(decisions, 1),
        "anchors/mean_size": decisions / max(len(sizes), 1),
        "anchors/max_size": float(max(sizes, default=0)),
        "anchors/met_after_start_frac": 1.0 - alone_later / max(later, 1),
    }


def first_decisions(episodes: Sequence[EpisodeRewards]) -> set[int]:
    """Return the indices of the first decisions of all episodes."""
    return {*accumulate((len(episode.rewards_T) for episode in episodes[:-1]), initial=0)}


def refuse_missing_keys(episodes: Sequence[EpisodeRewards], reader: str) -> None:
    """Raise AdvantageError unless each decision has a state key.

    `reader` is the name of the estimator that needs the keys; the error message contains it.
    """
    refuse_incomplete(
        episodes,
        [episode.state_keys_T for episode in episodes],
        "state keys",
        f"{reader} compares those made in the same state",
        hint="the task app sends them when algorithm.state_hashing_function names one",
    )
