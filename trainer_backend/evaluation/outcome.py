"""How the episodes of a row of metrics came out: the one figure of a run, and what its environment calls it.

A definition may explain itself after a colon (`unique achievements: how many different ...`). What stands
before it is the name that a person reads beside every figure.
"""

from collections.abc import Mapping
from typing import Any

from trainer_backend.core.statistics import Interval

# Rows of before they named their outcome are all of Crafter.
_UNIQUE = "unique achievements"


def outcome_name(row: Mapping[str, Any] | None) -> str:
    """The name of a row's outcome, of whatever kind of row; without a row, just that."""
    return "outcome" if row is None else _definition(row).partition(":")[0]


def outcome_meaning(row: Mapping[str, Any] | None) -> str:
    """What the definition says beyond the name; often nothing."""
    return "" if row is None else _definition(row).partition(":")[2].strip()


def outcome_interval(row: Mapping[str, Any]) -> Interval:
    """Of the episodes of an evaluation, or of a teacher; the bounds are missing for a lone one."""
    name = "eval/outcome_reward" if "eval/outcome_reward_low" in row else "eval/unique_achievements"
    return Interval(row[name], row.get(f"{name}_low"), row.get(f"{name}_high"), row["eval/episodes"])


def _definition(row: Mapping[str, Any]) -> str:
    room = "episode" if row["kind"] == "iteration" else "eval"
    return str(row.get(f"{room}/outcome_definition", _UNIQUE))
