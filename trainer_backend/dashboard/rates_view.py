"""Pure: success rate of each achievement, of the last evaluation beside the first."""

from collections.abc import Mapping
from dataclasses import dataclass

from trainer_backend.core.proportions import wilson_interval
from trainer_backend.dashboard.figures import NONE, spaced
from trainer_backend.dashboard.key_view import Ends
from trainer_backend.dashboard.sparks import Spark, spark_of
from trainer_backend.store.rows import Series

RATES = "eval/success_rates/"


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
