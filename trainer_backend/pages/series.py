"""Pure: series as charts, tables, one-sentence summaries and small curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_backend.pages.figures import number
from trainer_backend.pages.panels import Form, Line, Panel
from trainer_backend.store.metrics import numbers_of
from trainer_backend.store.rows import Series

# By (kind, metric).
Curves = Mapping[tuple[str, str], Series]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart, with a value or None for each of the chart's iterations."""

    label: str
    """Its name in the legend."""
    run: int
    """Index of its run, which is its colour."""
    line: int
    """Index of its line in the panel; with several runs a panel has one line."""
    dots: bool
    """Its points are marked, since they lie far apart."""
    values_N: tuple[float | None, ...]
    low_N: tuple[float | None, ...] = ()
    """The band; both of its bounds are empty if the line has none."""
    high_N: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel with its values. All curves have the same iterations, or other values of the panel's x."""

    panel: Panel
    iterations_N: tuple[float, ...]
    curves: tuple[Curve, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the chart as static/charts.js reads it; absent bounds are left out."""
        panel = self.panel
        return {
            "key": panel.key, "title": panel.title, "form": panel.form, "stacked": panel.stacked,
            "unit": panel.x, "scatter": panel.scatter, "summary": summary(self), "x": self.iterations_N,
            "curves": [_curve_json(curve) for curve in self.curves],
        }  # fmt: skip


def chart_of(panel: Panel, runs: Sequence[tuple[str, Curves]]) -> Chart | None:
    """Draw a panel for runs given as (name, curves); None if no run has a value of it."""
    lines = [
        _RunLine(number, name, place, line, curves)
        for number, (name, curves) in enumerate(runs)
        for place, line in enumerate(panel.lines)
        if (line.kind, line.metric) in curves
    ]
    iterations_N = tuple(sorted({at for line in lines for at in line.series.iterations_N}))
    if not iterations_N:
        return None
    alone = len(runs) == 1
    return Chart(panel, iterations_N, tuple(_curve(line, iterations_N, alone=alone) for line in lines))


class _RunLine(NamedTuple):
    """A line of a panel with the curves of a run that has values for it."""

    run: int
    name: str
    place: int
    line: Line
    curves: Curves

    @property
    def series(self) -> Series:
        return self.curves[self.line.kind, self.line.metric]

    def bounds(self, *, alone: bool) -> tuple[tuple[Series, Sequence[float]], ...]:
        """The line's band; of a thinned line without a band, the extremes between its points."""
        band = [self.curves.get((self.line.kind, name)) for name in self.line.band or ()]
        if band and all(band):
            return tuple((one, one.values_N) for one in band if one is not None)
        series = self.series
        thinned = alone and series.low_N != series.high_N  # the bands of several runs would hide each other
        return ((series, series.low_N), (series, series.high_N)) if thinned else ()


def curves_of(rows: Iterable[Mapping[str, Any]], *, points: int) -> Curves:
    """Make the curves of a run from its rows of metrics, thinned in the same way as in the store."""
    values: dict[tuple[str, str], dict[int, float]] = {}
    for row in rows:
        for name, value in numbers_of(row):
            values.setdefault((row["kind"], name), {})[row["iteration"]] = value
    last = max((at for known in values.values() for at in known), default=0)
    return {key: _thinned(known, last // points + 1) for key, known in values.items()}


def _thinned(values: Mapping[int, float], stride: int) -> Series:
    """Replace every `stride` iterations by their mean, minimum and maximum."""
    stretches: dict[int, list[int]] = {}
    for at in sorted(values):
        stretches.setdefault(at // stride, []).append(at)
    each = [[values[at] for at in stretch] for stretch in stretches.values()]
    return Series(
        tuple(stretch[-1] for stretch in stretches.values()),
        tuple(sum(of) / len(of) for of in each), tuple(map(min, each)), tuple(map(max, each)),
    )  # fmt: skip


def summary(chart: Chart) -> str:
    """Describe a chart for a screen reader: the first and last value of each curve, and its range."""
    parts = [text for curve in chart.curves if (text := _curve_summary(chart, curve))]
    return f"{chart.panel.title}. {'; '.join(parts)}."


def table(chart: Chart) -> list[tuple[float, list[str]]]:
    """The values of a chart, one row per iteration, the newest first."""
    form = chart.panel.form
    return [
        (at, [_cell(curve, index, form) for curve in chart.curves])
        for index, at in reversed(list(enumerate(chart.iterations_N)))
    ]


def _curve(source: _RunLine, iterations_N: Sequence[int], *, alone: bool) -> Curve:
    line = source.line
    return Curve(
        (line.label or line.metric) if alone else source.name,
        source.run,
        source.place,
        line.kind == "evaluation",
        _on(iterations_N, source.series, source.series.values_N),
        *(_on(iterations_N, series, values) for series, values in source.bounds(alone=alone)),
    )


def _on(iterations_N: Sequence[int], series: Series, values: Sequence[float]) -> tuple[float | None, ...]:
    """Values on the chart's iterations; None where the series has no point."""
    if len(series.iterations_N) == len(iterations_N):  # a series has a subset of them: they are equal
        return tuple(values)
    by_iteration = dict(zip(series.iterations_N, values, strict=True))
    return tuple(map(by_iteration.get, iterations_N))


def _curve_summary(chart: Chart, curve: Curve) -> str:
    form = chart.panel.form
    points = [
        (at, value) for at, value in zip(chart.iterations_N, curve.values_N, strict=True) if value is not None
    ]
    if not points:
        return ""
    (begin, first), (end, last) = points[0], points[-1]
    if chart.panel.scatter:
        return f"{curve.label}: {len(points):,} points"
    if begin == end:
        return f"{curve.label}: {number(first, form)} at {chart.panel.x} {begin}"
    low, high = (number(bound([value for _, value in points]), form) for bound in (min, max))
    return (
        f"{curve.label}: {number(first, form)} at {chart.panel.x} {begin}, {number(last, form)} at {end}, "
        f"between {low} and {high}"
    )


def _cell(curve: Curve, index: int, form: Any) -> str:
    value = number(curve.values_N[index], form)
    low = curve.low_N[index] if curve.low_N else None
    high = curve.high_N[index] if curve.high_N else None
    return value if low is None or high is None else f"{value} ({number(low, form)} to {number(high, form)})"


def _curve_json(curve: Curve) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "label": curve.label, "run": curve.run, "line": curve.line, "dots": curve.dots,
        "y": _rounded(curve.values_N),
    }  # fmt: skip
    if curve.low_N:
        fields |= {"low": _rounded(curve.low_N), "high": _rounded(curve.high_N)}
    return fields


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """Round to 1e-8 of the largest value: finer than a picture shows, in a third of the bytes."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    digits = 8 - math.ceil(math.log10(largest)) if largest and math.isfinite(largest) else 0
    return [None if value is None else round(value, digits) for value in values]


# The size of a spark, in units of its SVG.
WIDTH, HEIGHT = 100.0, 24.0


@dataclass(frozen=True, slots=True)
class Spark:
    """A small curve beside a number: its points in SVG, and in words; both empty without a curve."""

    points: str
    words: str


def spark_of(
    series: Series | None, what: str, form: Form = "number", *, between: tuple[float, float] | None = None
) -> Spark:
    """Draw a series of at least two points.

    Args:
        what: the name of its values.
        between: values at the bottom and the top; by default the least and the greatest of the series.
    """
    if series is None or len(series.values_N) < 2:
        return Spark("", "")
    values = series.values_N
    low, high = between or (min(values), max(values))
    reach, step = high - low or 1.0, WIDTH / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{HEIGHT - 1 - (value - low) / reach * (HEIGHT - 2):.1f}"
        for at, value in enumerate(values)
    )
    return Spark(points, f"{what} from {number(values[0], form)} to {number(values[-1], form)}")
