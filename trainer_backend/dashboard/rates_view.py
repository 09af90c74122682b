"""Pure: the evaluations of a run, and the success rate of each achievement, last beside first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer_backend.core.proportions import wilson_interval
from trainer_backend.dashboard.figures import NONE, interval, number, spaced
from trainer_backend.dashboard.key_view import Ends
from trainer_backend.dashboard.sparks import Spark, spark_of
from trainer_backend.evaluation.outcome import outcome_interval, outcome_name
from trainer_backend.report.story import best_of
from trainer_backend.store.rows import Series

RATES = "eval/success_rates/"


def evaluation_table(rows: Sequence[Mapping[str, Any]]) -> Sequence[Sequence[str]]:
    """A head and a line an evaluation, the oldest first; empty before there is one.

    A Crafter score stands in it where an environment has one.
    """
    if not rows:
        return []
    best, scored = best_of(rows), any("eval/crafter_score" in row for row in rows)
    head = (
        "iteration",
        outcome_name(rows[-1]),
        *["Crafter score"] * scored,
        "decisions",
        "invalid",
        "episodes",
    )
    return [head] + [
        (
            f"{row['iteration']}{' (best)' if row is best else ''}",
            interval(outcome_interval(row)),
            *[number(_share(row, "eval/crafter_score"), "percent")] * scored,
            number(row.get("eval/decisions")),
            number(row.get("eval/invalid_frac"), "percent"),
            str(row["eval/episodes"]),
        )
        for row in rows
    ]


def _share(row: Mapping[str, Any], name: str) -> float | None:
    """Of a metric that counts in percent."""
    value = row.get(name)
    return None if value is None else value / 100


@dataclass(frozen=True, slots=True)
class RateRow:
    """Success rate of an achievement: texts, places on a scale of 100, and its curve over the evaluations."""

    name: str
    before: str
    after: str
    interval: str
    first: float | None
    last: float
    low: float
    high: float
    spark: Spark


@dataclass(frozen=True, slots=True)
class Rates:
    """Of the last evaluation, beside the first where that is another one."""

    before: str
    after: str
    rows: tuple[RateRow, ...]


def success_rates(held_out: Ends, curves: Mapping[str, Series]) -> Rates:
    """Of the last evaluation, the most frequent first; empty where the environment has no achievements.

    Args:
        curves: of the rates over the evaluations, by metric (`RATES` and the achievement's name).
    """
    first, last = held_out.first, held_out.last
    if last is None or not last.get("eval/success_rates"):
        return Rates("", "", ())
    before = first if first is not None and first["iteration"] != last["iteration"] else None
    old: Mapping[str, float] = before.get("eval/success_rates", {}) if before else {}
    rates: Mapping[str, float] = last["eval/success_rates"]
    names = sorted(rates, key=lambda name: (-rates[name], -old.get(name, 0.0), name))
    rows = tuple(
        _rate(
            name, old.get(name) if before else None, rates[name], int(last["eval/episodes"]),
            curves.get(RATES + name),
        )
        for name in names
    )  # fmt: skip
    return Rates(f"iteration {before['iteration']}" if before else "", f"iteration {last['iteration']}", rows)


def _rate(name: str, before: float | None, rate: float, episodes: int, curve: Series | None) -> RateRow:
    found = wilson_interval(round(rate * episodes), episodes)
    low, high = (rate if bound is None else bound for bound in (found.low, found.high))
    return RateRow(
        name=spaced(name),
        before=NONE if before is None else f"{before:.0%}",
        after=f"{rate:.0%}",
        interval=f"{low:.0%} to {high:.0%}",
        first=None if before is None else round(100 * before, 1),
        last=round(100 * rate, 1),
        low=round(100 * low, 1),
        high=round(100 * high, 1),
        spark=spark_of(curve, "success rate", "percent", between=(0.0, 1.0)),
    )
