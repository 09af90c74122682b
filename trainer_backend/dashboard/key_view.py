"""Pure: a run's key figures: texts from the first and last rows of its metrics."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.dashboard.figures import number
from trainer_backend.dashboard.panels import Form

_EVENT = "decision/nonzero_frac"
_FIGURES: tuple[tuple[str, str, Form], ...] = (
    ("training {outcome}", "episode/outcome_reward", "number"),
    ("reward an episode", "reward/mean", "number"),
    ("decisions with event reward", _EVENT, "percent"),
    ("entropy", "loss/entropy", "number"),
    ("decisions a second", "perf/decisions_per_s", "number"),
)


@dataclass(frozen=True, slots=True)
class Ends:
    """The first and the last row of a kind; None before there is one."""

    first: Mapping[str, Any] | None
    last: Mapping[str, Any] | None


def ends_of(rows: Sequence[Mapping[str, Any]]) -> Ends:
    """Of rows of one kind, oldest first."""
    return Ends(rows[0], rows[-1]) if rows else Ends(None, None)


@dataclass(frozen=True, slots=True)
class KeyFigure:
    """One of the figures that a reader looks for first; `beside` says what it compares with."""

    name: str
    value: str
    beside: str = ""


def key_figures(iterations: Ends, held_out: Ends, outcome: str) -> list[KeyFigure]:
    """What the rows have of it; what they have not is left out.

    Args:
        outcome: what the environment calls its outcome.
    """
    found = _held_out(held_out, outcome)
    last = iterations.last
    if last is None:
        return found
    achievements = "episode/unique_achievements" in last
    return found + [
        KeyFigure(name.format(outcome=outcome), number(last[metric], form), _before(iterations, metric, form))
        for name, metric, form in _FIGURES
        if last.get(metric) is not None and (achievements or metric != _EVENT)
    ]


def _held_out(ends: Ends, outcome: str) -> list[KeyFigure]:
    row = ends.last
    if row is None:
        return []
    bounds = bounds_of(row)
    beside = [f"95 % {bounds}" if bounds else "", _before(ends, "eval/outcome_reward", "number")]
    told = ", ".join(filter(None, beside))
    found = [KeyFigure(f"held-out {outcome}", number(row.get("eval/outcome_reward")), told)]
    if "eval/crafter_score" in row:
        score = f"{number(row['eval/crafter_score'])} %"
        found.append(KeyFigure("Crafter score", score, "geometric mean of success rates"))
    return found


def _before(ends: Ends, metric: str, form: Form) -> str:
    """What it was at first; nothing where that is the same row."""
    first, last = ends.first, ends.last
    if first is None or last is None or first["iteration"] == last["iteration"] or first.get(metric) is None:
        return ""
    return f"{number(first[metric], form)} at iteration {first['iteration']}"


def bounds_of(row: Mapping[str, Any]) -> str:
    """The 95 % interval of a held-out outcome, where the row has it."""
    low, high = row.get("eval/outcome_reward_low"), row.get("eval/outcome_reward_high")
    return "" if low is None or high is None else f"{number(low)} to {number(high)}"
