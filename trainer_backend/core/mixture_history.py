"""The history of a mixture: metrics of earlier iterations, on which later choices depend. Pure.

A resumed run has the same metrics, so it makes the same choices as an uninterrupted run.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_backend.core.policies import ACTOR

# Names of metrics by policy, as in `mixture/{policy}/{name}`.
EPISODES, OUTCOME, COUNTED = "episodes", "outcome_reward", "counted_share"


@dataclass(frozen=True, slots=True)
class Past:
    """A finished iteration."""

    iteration: int
    """Its number, from 1."""
    episodes: Mapping[str, float]
    """By policy, the number of episodes that it sampled, above 0."""
    outcomes: Mapping[str, float]
    """By policy, the mean outcome of its episodes."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """By policy, `behaviour.counted_share` of its samples in the update."""


def metric_name(policy: str, name: str) -> str:
    """Return the name of a policy's metric."""
    return f"mixture/{policy}/{name}"


def read_past(rows: Iterable[Mapping[str, Any]], fixed: Sequence[str]) -> tuple[Past, ...]:
    """Read the iterations of a metrics file, in its order; `fixed` are the names of the fixed policies."""

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
    """Compute the mean of OUTCOME or COUNTED over the episodes of these policies; None if none is known."""
    known = [
        (item.episodes[policy], values[policy])
        for item in past
        for values in (item.outcomes if of == OUTCOME else item.counted,)
        for policy in policies
        if policy in values and policy in item.episodes
    ]
    count = math.fsum(episodes for episodes, _ in known)
    return math.fsum(episodes * value for episodes, value in known) / count if count else None
