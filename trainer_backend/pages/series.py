"""Pure: makes charts, tables and small curves from series of metrics, and the horizontal axes of a run.

A chart is a dict for static/charts.js. It contains the positions `x` on the horizontal axis, and `curves`.
Each curve is a dict: `y` contains a value or None for each position, and `low` and `high` the bounds of its
band, if it has a band. `run` is the index of the curve's run, and `line` the index of its line in the panel.
`dots` is true for curves of separate points, such as evaluations, which are marked and never smoothed.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

from trainer_backend.core.metric import Form, Line, Panel
from trainer_backend.pages.figures import number
from trainer_backend.store.rows import Curve

Key = tuple[str, str]  # (kind, metric)
Curves = Mapping[Key, Curve]
Chart = dict[str, Any]
Axes = Mapping[str, Mapping[int, float]]  # by axis: the position after each iteration
Values = Sequence[float | None]
EVERY_POINT = 10**9  # a limit on the points of a curve with which no curve is thinned


def draw_chart(panel: Panel, runs: Sequence[tuple[str, Curves]]) -> Chart | None:
    """Return the chart of a panel for runs given as (name, curves), or None if no run has values for it."""
    lines = [
        (number, name, place, line, curves)
        for number, (name, curves) in enumerate(runs)
        for place, line in enumerate(panel.lines)
        if (line.kind, line.metric) in curves
    ]
    x_N = sorted({at for *_, line, curves in lines for at in curves[line.kind, line.metric].iterations})
    if not x_N:
        return None
    alone = len(runs) == 1
    return make_chart(
        panel,
        x_N,
        [
            make_curve(
                line.label if alone else name,
                _values_at(x_N, (own := curves[line.kind, line.metric]).iterations, own.values),
                run=run,
                line=place,
                dots=line.kind != "iteration",
                band=[_values_at(x_N, *bound) for bound in _band(line, curves, alone=alone)],
            )
            for run, name, place, line, curves in lines
        ],
    )


def make_chart(panel: Panel, x_N: Sequence[float], curves: Sequence[dict[str, Any]]) -> Chart:
    shown = {name: value for name, value in vars(panel).items() if name != "lines"}
    return shown | {"x": list(x_N), "curves": list(curves)}


def make_curve(
    label: str, y_N: Values, *, run: int = 0, line: int = 0, dots: bool = False, band: Sequence[Values] = ()
) -> dict[str, Any]:
    bounds = {name: _rounded(values) for name, values in zip(("low", "high"), band, strict=bool(band))}
    return {"label": label, "run": run, "line": line, "dots": dots, "y": _rounded(y_N), **bounds}


def _band(line: Line, curves: Curves, *, alone: bool) -> Sequence[tuple[Sequence[int], Sequence[float]]]:
    """Return (iterations, values) of the lower and the upper bound of a line's band; empty without a band.

    If the chart shows a single run (`alone`), a line without bounds whose points were thinned also has a
    band: the extremes of the values between its points.
    """
    bounds = [curves[line.kind, name] for name in line.bounds if (line.kind, name) in curves]
    if len(bounds) == 2:
        return [(bound.iterations, bound.values) for bound in bounds]
    own = curves[line.kind, line.metric]
    thinned = alone and own.low != own.high  # with several runs, the bands would hide each other
    return [(own.iterations, own.low), (own.iterations, own.high)] if thinned else ()


def _values_at(x_N: Sequence[float], iterations: Sequence[int], values: Sequence[float]) -> Values:
    if len(iterations) == len(x_N):  # x_N has the iterations of all curves, so both are equal
        return values
    by_iteration = dict(zip(iterations, values, strict=True))
    return [by_iteration.get(int(at)) for at in x_N]


def _rounded(values: Values) -> list[float | None]:
    """Round values to 1e-8 of the largest value. This shrinks the JSON to a third and changes no picture."""
    largest = max(map(abs, filter(None, values)), default=0.0)
    digits = 8 - math.ceil(math.log10(largest)) if largest and math.isfinite(largest) else 0
    return [None if value is None else round(value, digits) for value in values]


# Metrics of an iteration from which the horizontal axes are made.
_STEPS, _EPISODES, _TOKENS = "episode/env_steps", "episode/count", "inference/sampled_tokens"
_BEGIN, _END, _STARTS = "timeline/collect_start", "timeline/learn_end", "recovery/resumes"
AXIS_METRICS = (_STEPS, _EPISODES, _TOKENS, _BEGIN, _END, _STARTS)
AXES = {
    "iteration": "iterations",
    "steps": "env steps",
    "tokens": "sampled tokens",
    "hours": "hours of training",
}


def add_up_axes(rows: Mapping[int, Mapping[str, Any]]) -> Axes:
    """Return the horizontal axes of a run, except for the axis of iterations.

    `rows` contains the available AXIS_METRICS of every iteration. `steps` and `tokens` are the total env
    steps and sampled tokens up to each iteration. `hours` is the time from the first rollout to the end of
    each iteration. It includes evaluations and waits for slow task apps, but neither the warm-up nor the
    pauses between two starts of the run.
    """
    each = {
        "steps": {
            at: row[_STEPS] * row[_EPISODES] for at, row in rows.items() if {_STEPS, _EPISODES} <= row.keys()
        },
        "tokens": {at: row[_TOKENS] for at, row in rows.items() if _TOKENS in row},
        "hours": _hours(rows),
    }
    return {
        axis: dict(zip(sorted(values), accumulate(values[at] for at in sorted(values)), strict=True))
        for axis, values in each.items()
        if any(values.values())
    }


def _hours(rows: Mapping[int, Mapping[str, Any]]) -> dict[int, float]:
    """Return for each iteration the hours from the end of the previous iteration to its own end.

    For the first iteration after a start of the run, return the hours from its own beginning instead.
    """
    added, before = {}, None
    for at in sorted(rows):
        row = rows[at]
        if _BEGIN not in row or _END not in row:
            continue
        start = row.get(_STARTS, 0.0)
        since = before[1] if before is not None and before[0] == start else row[_BEGIN]
        added[at] = max(0.0, row[_END] - since) / 3600
        before = start, row[_END]
    return added


def place_on_axes(axes: Sequence[Axes], charts: Iterable[Chart]) -> dict[str, Any]:
    """Return the iterations with values in charts, and the runs' positions on each axis at these iterations.

    An axis is left out if any run lacks it. Before a run's first iteration, the position is 0. If an
    iteration has no position, the position of the last earlier iteration is used.
    """
    at = sorted({x for chart in charts if chart["unit"] == "iteration" for x in chart["x"]})
    shared = [axis for axis in AXES if axes and all(axis in own for own in axes)]
    return {
        "at": at,
        "axes": {axis: {"name": AXES[axis], "x": [_place(own[axis], at) for own in axes]} for axis in shared},
    }  # fmt: skip


def _place(axis: Mapping[int, float], at: Sequence[float]) -> list[float]:
    iterations, values = [*axis], [0.0, *axis.values()]
    return [float(f"{values[bisect_right(iterations, x)]:.9g}") for x in at]


def table(chart: Chart) -> list[tuple[float, list[str]]]:
    """Return a chart's values as texts, a row per position on the horizontal axis; the last comes first."""
    return [
        (at, [_cell(curve, index, chart["form"]) for curve in chart["curves"]])
        for index, at in reversed(list(enumerate(chart["x"])))
    ]


def _cell(curve: Mapping[str, Any], index: int, form: Form) -> str:
    value = number(curve["y"][index], form)
    low, high = (curve[name][index] if name in curve else None for name in ("low", "high"))
    return value if low is None or high is None else f"{value} ({number(low, form)} to {number(high, form)})"


# The size of a small curve (`draw_spark`), in units of its SVG.
WIDTH, HEIGHT = 100.0, 24.0


def draw_spark(
    values: Sequence[float], what: str, form: Form = "number", *, between: tuple[float, float] | None = None
) -> dict[str, str]:
    """Return the SVG points of a small curve through the values, and a description of the curve in words.

    `what` names the values in the description. `between` contains the values at the bottom and at the top of
    the curve, by default the smallest and the largest value. Both texts are empty for fewer than two values.
    """
    if len(values) < 2:
        return {"points": "", "words": ""}
    low, high = between or (min(values), max(values))
    reach, step = high - low or 1.0, WIDTH / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{HEIGHT - 1 - (value - low) / reach * (HEIGHT - 2):.1f}"
        for at, value in enumerate(values)
    )
    return {"points": points, "words": f"{what} from {number(values[0], form)} to {number(values[-1], form)}"}
