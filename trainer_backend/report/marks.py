"""What charts draw for a mean with its interval: bands, error bars, rates of achievements."""

import math
from collections.abc import Sequence
from typing import Any

from trainer_backend.core.proportions import wilson_interval
from trainer_backend.core.statistics import Interval
from trainer_backend.report.story import Row


def band(
    axes: Any,
    points: Sequence[tuple[int, Interval]],
    *,
    colour: str,
    label: str,
    line: str = "-",
    marker: str = ".",
) -> None:
    """A line through the means and a band over their intervals; a lone point gets a bar instead."""
    if not points:
        return
    if len(points) == 1:
        found = points[0][1]
        axes.errorbar(
            [points[0][0]], [found.mean], yerr=arms([found]), color=colour, marker=marker or ".", capsize=4,
            linestyle="none", label=label,
        )  # fmt: skip
        return
    x = [at for at, _ in points]
    means = [found.mean for _, found in points]
    axes.plot(x, means, color=colour, linestyle=line, marker=marker, label=label)
    low, high = zip(*(bounds(found) for _, found in points), strict=True)
    axes.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)


def bounds(found: Interval) -> tuple[float, float]:
    """Bounds for drawing: NaN, which is left out, where there are none."""
    return (math.nan if found.low is None else found.low, math.nan if found.high is None else found.high)


def arms(found: Sequence[Interval]) -> list[list[float]]:
    """[2][N] lengths of error bars; rounding may not make one negative."""
    ends = [(item.mean, *bounds(item)) for item in found]
    return [
        [max(mean - low, 0.0) for mean, low, _ in ends],
        [max(high - mean, 0.0) for mean, _, high in ends],
    ]


def rate_points(
    axes: Any, names: Sequence[str], row: Row, *, offset: float, label: str, colour: str, marker: str
) -> None:
    """The rate of each achievement in an evaluation's row, a line a name, moved up by `offset`."""
    count = int(row["eval/episodes"])
    rates = [float(row.get("eval/success_rates", {}).get(name, 0.0)) for name in names]
    found = [wilson_interval(round(rate * count), count) for rate in rates]
    axes.errorbar(
        rates, [index + offset for index in range(len(names))], xerr=arms(found), color=colour,
        marker=marker, markersize=5, linestyle="none", elinewidth=1.2, label=label,
    )  # fmt: skip
