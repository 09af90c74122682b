"""Pure: series as charts, tables, one-sentence summaries and small curves."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from trainer_backend.pages.figures import number
from trainer_backend.pages.panels import Form, Line, Panel
from trainer_backend.store.rows import Series
from trainer_backend.store.sync_lines import numbers_of

# By (kind, metric).
Curves = Mapping[tuple[str, str], Series]


@dataclass(frozen=True, slots=True)
class Curve:
    """A line of a chart, on the chart's iterations; None where it has no value.

    Attributes:
        label: what the legend says.
        run: which of the runs laid over one another, from 0: its colour.
        line: which line of the panel, from 0; with several runs a panel has one line.
        dots: its points stand far apart, and are marked.
        values_N, low_N, high_N: [N] each; the bounds empty where the line has no band.
    """

    label: str
    run: int
    line: int
    dots: bool
    values_N: tuple[float | None, ...]
    low_N: tuple[float | None, ...] = ()
    high_N: tuple[float | None, ...] = ()


@dataclass(frozen=True, slots=True)
class Chart:
    """A panel with its values: all curves over the same iterations, or whatever else its panel has as x."""

    panel: Panel
    iterations_N: tuple[float, ...]
    curves: tuple[Curve, ...]

    def as_json(self) -> dict[str, Any]:
        """Return the chart as static/charts.js reads it; absent bounds are left out."""
        return {
            "key": self.panel.key,
            "title": self.panel.title,
            "form": self.panel.form,
            "stacked": self.panel.stacked,
            "unit": self.panel.x,
            "scatter": self.panel.scatter,
            "summary": summary(self),
            "x": self.iterations_N,
            "curves": [_curve_json(curve) for curve in self.curves],
        }


def chart_of(panel: Panel, runs: Sequence[tuple[str, Curves]]) -> Chart | None:
    """A panel with the values of each run, by the run's name; None where none has any."""
    found = [
        _Found(number, name, place, line, curves)
        for number, (name, curves) in enumerate(runs)
        for place, line in enumerate(panel.lines)
        if (line.kind, line.metric) in curves
    ]
    iterations_N = tuple(sorted({at for one in found for at in one.series.iterations_N}))
    if not iterations_N:
        return None
    return Chart(panel, iterations_N, tuple(_curve(one, iterations_N, alone=len(runs) == 1) for one in found))


class _Found(NamedTuple):
    """A line of a panel that a run has values for."""

    run: int
    name: str
    place: int
    line: Line
    curves: Curves

    @property
    def series(self) -> Series:
        return self.curves[self.line.kind, self.line.metric]

    def bounds(self, *, alone: bool) -> tuple[tuple[Series, Sequence[float]], ...]:
        """The line's band; of a thinned line without one, how far the stretches between its points reach."""
        band = [self.curves.get((self.line.kind, name)) for name in self.line.band or ()]
        if band and all(band):
            return tuple((one, one.values_N) for one in band if one is not None)
        series = self.series
        thinned = alone and series.low_N != series.high_N  # of several runs they would hide one another
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
    """Means of stretches of so many iterations, and how far each reaches."""
    stretches: dict[int, list[int]] = {}
    for at in sorted(values):
        stretches.setdefault(at // stride, []).append(at)
    each = [[values[at] for at in stretch] for stretch in stretches.values()]
    return Series(
        tuple(stretch[-1] for stretch in stretches.values()),
        tuple(sum(of) / len(of) for of in each), tuple(map(min, each)), tuple(map(max, each)),
    )  # fmt: skip


def summary(chart: Chart) -> str:
    """For who cannot see it: where each curve begins and ends, and how far it reached."""
    told = [text for curve in chart.curves if (text := _told(chart, curve))]
    return f"{chart.panel.title}. {'; '.join(told)}."


def table(chart: Chart) -> list[tuple[float, list[str]]]:
    """A row an iteration, the newest first: the value of each curve, and of a band its bounds."""
    form = chart.panel.form
    return [
        (at, [_cell(curve, index, form) for curve in chart.curves])
        for index, at in reversed(list(enumerate(chart.iterations_N)))
    ]


def _curve(found: _Found, iterations_N: Sequence[int], *, alone: bool) -> Curve:
    line = found.line
    return Curve(
        (line.label or line.metric) if alone else found.name,
        found.run,
        found.place,
        line.kind == "evaluation",
        _on(iterations_N, found.series, found.series.values_N),
        *(_on(iterations_N, series, values) for series, values in found.bounds(alone=alone)),
    )


def _on(iterations_N: Sequence[int], series: Series, values: Sequence[float]) -> tuple[float | None, ...]:
    """Values on the chart's iterations; None where the series has no point."""
    if len(series.iterations_N) == len(iterations_N):  # of a subset: so they are the same
        return tuple(values)
    known = dict(zip(series.iterations_N, values, strict=True))
    return tuple(map(known.get, iterations_N))


def _told(chart: Chart, curve: Curve) -> str:
    form = chart.panel.form
    known = [
        (at, value) for at, value in zip(chart.iterations_N, curve.values_N, strict=True) if value is not None
    ]
    if not known:
        return ""
    (begin, first), (end, last) = known[0], known[-1]
    if chart.panel.scatter:
        return f"{curve.label}: {len(known):,} points"
    if begin == end:
        return f"{curve.label}: {number(first, form)} at {chart.panel.x} {begin}"
    low, high = (number(bound([value for _, value in known]), form) for bound in (min, max))
    return (
        f"{curve.label}: {number(first, form)} at {chart.panel.x} {begin}, {number(last, form)} at {end}, "
        f"between {low} and {high}"
    )


def _cell(curve: Curve, index: int, form: Any) -> str:
    told = number(curve.values_N[index], form)
    low = curve.low_N[index] if curve.low_N else None
    high = curve.high_N[index] if curve.high_N else None
    return told if low is None or high is None else f"{told} ({number(low, form)} to {number(high, form)})"


def _curve_json(curve: Curve) -> dict[str, Any]:
    told: dict[str, Any] = {
        "label": curve.label, "run": curve.run, "line": curve.line, "dots": curve.dots,
        "y": _rounded(curve.values_N),
    }  # fmt: skip
    if curve.low_N:
        told |= {"low": _rounded(curve.low_N), "high": _rounded(curve.high_N)}
    return told


def _rounded(values: Sequence[float | None]) -> list[float | None]:
    """To a hundred millionth of the largest: more than a picture can show, and a third of the bytes."""
    largest = max((abs(value) for value in values if value is not None), default=0.0)
    digits = 8 - math.ceil(math.log10(largest)) if largest and math.isfinite(largest) else 0
    return [None if value is None else round(value, digits) for value in values]


# The size of a small curve beside a number, in units of its SVG.

WIDTH, HEIGHT = 100.0, 24.0


@dataclass(frozen=True, slots=True)
class Spark:
    """The points, and the same in words; both empty where there is no curve."""

    points: str
    told: str


def spark_of(
    series: Series | None, what: str, form: Form = "number", *, between: tuple[float, float] | None = None
) -> Spark:
    """A curve of two points at least.

    Args:
        what: it is a curve of, for its words.
        between: values of its bottom and its top; absent: its own least and greatest.
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
