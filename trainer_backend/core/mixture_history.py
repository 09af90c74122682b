"""The history of a mixture: the metrics of earlier iterations, on which alone a later choice may depend.

A resumed run has the rows of metrics, so it chooses as it would have without a stop. Pure.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer_backend.core.policies import ACTOR

# Rows of metrics have them by policy, as `mixture/{policy}/{name}`.
EPISODES, OUTCOME, COUNTED = "episodes", "outcome_reward", "counted_share"


@dataclass(frozen=True, slots=True)
class Past:
    """A finished iteration."""

    iteration: int
    """Its number, from 1."""
    episodes: Mapping[str, float]
    """By policy, how many it sampled; only those that sampled any."""
    outcomes: Mapping[str, float]
    """By policy, the mean outcome of these."""
    counted: Mapping[str, float] = field(default_factory=dict)
    """By policy, how much its samples counted in the update (`behaviour.counted_share`)."""


def metric_name(policy: str, name: str) -> str:
    """The name of one policy's figure in a row of metrics."""
    return f"mixture/{policy}/{name}"


def read_past(rows: Iterable[Mapping[str, Any]], fixed: Sequence[str]) -> tuple[Past, ...]:
    """The iterations of a metrics file, in its order; `fixed` are the names of the fixed policies."""
    return tuple(_past(row, (ACTOR, *fixed)) for row in rows if row.get("kind") == "iteration")


def _past(row: Mapping[str, Any], policies: Sequence[str]) -> Past:
    def of_each(name: str) -> dict[str, float]:
        values = {policy: row.get(metric_name(policy, name)) for policy in policies}
        return {policy: value for policy, value in values.items() if value is not None}

    episodes = {policy: count for policy, count in of_each(EPISODES).items() if count}
    return Past(row["iteration"], episodes, of_each(OUTCOME), of_each(COUNTED))


def mean_over(past: Iterable[Past], policies: Collection[str], *, of: str) -> float | None:
    """Mean of OUTCOME or COUNTED over the samples of all these policies, an episode counting once.

    None where none is known.
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
