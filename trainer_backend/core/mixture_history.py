"""Metrics of finished iterations, from which schedules of the mixture choose who samples next. Pure.

A *mixture* is a run in which the actor and fixed policies sample rollouts. A resumed run reads the same
metrics as an uninterrupted run, so it makes the same choices.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_backend.core.metric import Metric, Panel, Row
from trainer_backend.core.policies import ACTOR

# Names of metrics by policy, as in `mixture/{policy}/{name}`.
EPISODES, OUTCOME, COUNTED = "episodes", "outcome_reward", "counted_share"


@dataclass(frozen=True, slots=True)
class Past:
    """What each policy of the mixture contributed to a finished iteration."""

    iteration: int
    """Number of the iteration, from 1."""
    episodes: Mapping[str, float]
    """Number of episodes that each policy sampled. Policies without episodes are absent."""
    outcomes: Mapping[str, float]
    """Mean outcome of the episodes of each policy."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """How much the samples of each policy counted in the update (`core.behaviour.counted_share`)."""


# Metrics of each policy. `run/iteration_metrics.py` computes the first two rows; the learner computes others.
METRICS = (
    Row(
        Metric("mixture/*/episodes", "rollouts that it finished", "mix"),
        Metric("mixture/*/failed", "rollouts that it should have sampled and did not"),
    ),
    Row(
        Metric("mixture/*/decisions", "decisions"),
        Metric("mixture/*/outcome_reward", "outcome", "by_policy"),
        Metric("mixture/*/reward", "sum of r_t"),
        Metric("mixture/*/unique_achievements", "unique achievements, where there are any"),
        when="means of an episode",
    ),
    Row(
        Metric("mixture/*/ess", "effective sample size, as in `mixture/ess`", "ess"),
        Metric("mixture/*/counted_share", "how much its samples count, as in `mixture/counted_share`",
               "counted"),
        Metric("mixture/*/weight_mean", "mean truncated weight"),
        Metric(
            "mixture/*/truncated_share",
            "share of the weights that were cut to the cap, or masked (absent for `single_ratio`, which has "
            "no weight)",
            Panel("weights", "Mixture", "Weights held at the cap",
                  "Share of each policy's importance weights.", form="percent"),
        ),
    ),
    Row(
        Metric("mixture/*/lost_mass", "the actor's probability on tokens that the policy never says, in the "
               "states that the policy visits"),
        when="for a fixed policy with truncated sampling",
        note="It is estimated as 1 - the mean of p/mu over its tokens, so noise may make it negative",
    ),
    Row(
        Metric("mixture/*/clip_low_share", "share of tokens clipped below"),
        Metric("mixture/*/clip_high_share", "share clipped above"),
        Metric("mixture/*/ratio_mean", "mean ratio"),
        Metric("mixture/*/entropy", "entropy"),
        when="of the update, as `loss/*` has them for the actor",
        note="A `single_ratio` policy whose shares grow teaches less and less",
    ),
)  # fmt: skip


def metric_name(policy: str, name: str) -> str:
    return f"mixture/{policy}/{name}"


def read_past(rows: Iterable[Mapping[str, Any]], fixed: Sequence[str]) -> tuple[Past, ...]:
    """Return one `Past` for each iteration in the lines of a metrics file, in the order of the file.

    `fixed` are the names of the fixed policies.
    """

    def by_policy(row: Mapping[str, Any], name: str) -> dict[str, float]:
        values = {policy: row.get(metric_name(policy, name)) for policy in (ACTOR, *fixed)}
        return {policy: value for policy, value in values.items() if value is not None}

    return tuple(
        Past(
            row["iteration"],
            {policy: count for policy, count in by_policy(row, EPISODES).items() if count},
            by_policy(row, OUTCOME),
            by_policy(row, COUNTED),
        )
        for row in rows
        if row.get("kind") == "iteration"
    )


def mean_over(past: Iterable[Past], policies: Collection[str], *, of: str) -> float | None:
    """Return the mean of the metric `of` (OUTCOME or COUNTED) over all episodes of these policies.

    Return None if no iteration has a value for any of these policies.
    """
    known = [
        (item.episodes[policy], values[policy])
        for item in past
        for values in (item.outcomes if of == OUTCOME else item.counted,)
        for policy in policies
        if policy in values and policy in item.episodes
    ]
    count = math.fsum(episodes for episodes, _ in known)
    return math.fsum(episodes * value for episodes, value in known) / count if count else None
