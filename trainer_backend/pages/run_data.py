"""Pure: computes the values that the page of one run, or of several overlaid runs, shows.

The runs are `Run` objects, read from a service's store (pages/run.py) or from run folders (pages/report.py,
pages/compare.py). The same templates show the values in both cases.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from statistics import fmean
from typing import Any, get_args

from trainer_backend.collect.losses import FAILED
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.core.metric import Form, Kind, Panel, Section
from trainer_backend.pages.facts import differing_keys, group_seeds
from trainer_backend.pages.figures import NONE, number, signed
from trainer_backend.pages.panels import PANELS, make_other_panels, merge_outcome, restrict, split_by_line
from trainer_backend.pages.run_view import FIGURES, evaluation_table, key_figures, list_losses, success_rates
from trainer_backend.pages.series import Axes, Curves, draw_chart, place_on_axes
from trainer_backend.pages.timeline import SHOWN, draw_timeline
from trainer_backend.store.rows import CheckpointRow, Curve, Job

KINDS = get_args(Kind)
MOST_LOSSES = 50  # stages that the page lists
_POINTS, _LEAST_POINTS = 400, 100  # a chart is some 400 pixels wide


@dataclass(frozen=True, slots=True)
class Run:
    job: Job
    name: str  # unique on the page
    rows: Sequence[Mapping[str, Any]]
    """Rows of metrics, the oldest first. The page of one run needs the first and the last iterations, all
    evaluations, and the stages that lost rollouts. A page of several runs needs the last row of each kind."""
    rates: Mapping[str, Curve] = field(default_factory=dict)
    """The success rate of each achievement over the evaluations, by the name of its metric."""
    best: int | None = None  # the iteration of the best checkpoint
    checkpoints: Sequence[CheckpointRow] = ()


def points_for(runs: int) -> int:
    """Return the largest number of points that a curve may have in a chart of this many runs."""
    return max(_POINTS // runs, _LEAST_POINTS)


def panels_for(runs: Sequence[Run], metrics: Iterable[tuple[str, str]]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels that show the runs' metrics, and generated panels for metrics that no panel shows.

    `metrics` contains the (kind, metric) pairs of the runs.
    """
    pairs = sorted(pair for pair in metrics if pair[0] in KINDS)
    panels = merge_outcome(restrict(PANELS, pairs), name_outcome(runs))
    return panels if len(runs) == 1 else split_by_line(panels), make_other_panels(pairs)


def name_outcome(runs: Sequence[Run]) -> str:
    """Return the name that the runs give to an episode's outcome, or "outcome" if their names differ."""
    last = [{row["kind"]: row for row in run.rows} for run in runs]
    names = {outcome_name(row) for rows in last for kind, row in rows.items() if kind in KINDS}
    return names.pop() if len(names) == 1 else outcome_name(None)


def run_data(
    runs: Sequence[Run], metrics: Iterable[tuple[str, str]], *, apart: bool = False, pin: str = ""
) -> dict[str, Any]:
    """Return the values of a page except those of its charts: panels by section, and facts about the runs.

    For one run, the facts are figures and tables. For several runs, they are the runs' names, their last
    figures and the job keys that differ. With `apart`, runs that differ only in the seed are not averaged.
    `pin` is the id or name of the reference run.
    """
    panels, rest = panels_for(runs, metrics)
    data = {"sections": group_by_section([*map(vars, panels)]), "rest": rest}
    if len(runs) > 1:
        groups = name_groups(runs)
        drawn = [{"name": run.name, "runs": [at]} for at, run in enumerate(runs)] if apart else groups
        sign = {at: group["runs"][0] for group in drawn for at in group["runs"]}
        return data | {
            "runs": [
                name_run(run) | {"state": run.job.state, "sign": sign[at]} for at, run in enumerate(runs)
            ],
            "differs": differing_keys([run.job.config for run in runs]),
            "seeds": len(groups) < len(runs),
            "last": last_values(runs, drawn, pin),
            "rates": last_rates(runs),
        }
    (run,) = runs
    iterations, evaluations = (
        [row for row in run.rows if row["kind"] == kind] for kind in ("iteration", "evaluation")
    )
    last = next(iter((evaluations or iterations)[-1:]), None)
    lossy = [row for row in run.rows if any(row.get(name) for name in FAILED)]
    return data | {
        "key": key_figures(iterations, evaluations, outcome_name(last)),
        "rates": success_rates(evaluations, run.rates),
        "evaluations": evaluation_table(evaluations, run.best),
        "timeline": draw_timeline(iterations[-SHOWN:], evaluations),
        "losses": list_losses(lossy[-MOST_LOSSES:]),
        "checkpoints": run.checkpoints,
    }


def group_by_section(panels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Group panels (as dicts) or charts by section. Empty sections are left out."""
    return [
        {"id": "of-" + title.lower().replace(" ", "-"), "title": title, "panels": own}
        for title in get_args(Section)
        if title and (own := [panel for panel in panels if panel["section"] == title])
    ]


def chart_data(
    runs: Sequence[Run], curves: Sequence[Curves], axes: Sequence[Axes], panels: Iterable[Panel]
) -> dict[str, Any]:
    """Return the input of static/charts.js: the charts with values, the runs, their groups, and the axes.

    A group contains runs that differ only in the seed. `curves` and `axes` have an item for each run; the
    caller has thinned the curves to `points_for` points.
    """
    named = [(run.name, its) for run, its in zip(runs, curves, strict=True)]
    charts = [chart for chart in (draw_chart(panel, named) for panel in panels) if chart is not None]
    return {
        "charts": charts,
        "runs": [*map(name_run, runs)],
        "groups": name_groups(runs),
        **place_on_axes(axes, charts),
    }


def name_run(run: Run) -> dict[str, Any]:
    return {"id": run.job.id or run.name, "name": run.name}


def name_groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Group runs that differ only in the seed. A group has a `name` and the indices of its `runs`.

    The name is the common prefix of the runs' names, for example `grpo_seed (3 seeds)`. If the name of
    another run starts with that prefix too, the name of the group's first run is used instead.
    """
    groups = []
    for group in group_seeds([run.job.config for run in runs]):
        name = first = runs[group[0]].name
        if len(group) > 1:
            begin = commonprefix([runs[at].name for at in group]).rstrip("-_./ ")  # noqa: RUF071 (no paths)
            taken = any(run.name.startswith(begin) for at, run in enumerate(runs) if at not in group)
            name = f"{begin if begin and not taken else first} ({len(group)} seeds)"
        groups.append({"name": name, "runs": group})
    return groups


def last_values(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]], pin: str) -> dict[str, Any]:
    """Return a table of each group's last figures, and of their differences to a reference group.

    The reference is the group with the run `pin`. Each item of `rows` is a group, with `pinned` (whether it
    is the reference) and `cells`, one per figure. A cell contains three texts: `value` (the mean over the
    runs), `difference`, and `reach` (the lowest and the highest value of the runs).
    """
    kinds = [{row["kind"]: row for row in run.rows} for run in runs]
    last = [{**rows.get("iteration", {}), **rows.get("evaluation", {})} for rows in kinds]
    figures = [figure for figure in FIGURES if any(row.get(figure[1]) is not None for row in last)]
    base = next((own for own in groups if any(name_run(runs[at])["id"] == pin for at in own["runs"])), None)

    def values(group: Mapping[str, Any], metric: str) -> list[float]:
        return [value for at in group["runs"] if (value := last[at].get(metric)) is not None]

    def cells(group: Mapping[str, Any]) -> Iterator[dict[str, str]]:
        for _, metric, form, unit, _ in figures:
            others = [] if base is None or base is group else values(base, metric)
            yield _cell(values(group, metric), others, form, unit)

    return {
        "figures": [name.format(outcome=name_outcome(runs)) for name, *_ in figures],
        "rows": [{**group, "pinned": group is base, "cells": [*cells(group)]} for group in groups],
    }


def last_rates(runs: Sequence[Run]) -> list[tuple[str, list[str]]]:
    """Return each achievement with its success rates in the last evaluation of each run, as texts."""
    rates = []
    for run in runs:
        last = [row for row in run.rows if row["kind"] == "evaluation"][-1:]
        rows = success_rates(last, {}).get("rows", ())
        rates.append({row["name"]: f"{row['after']} ({row['interval']})" for row in rows})
    names = dict.fromkeys(name for own in rates for name in own)
    return [(name, [own.get(name, NONE) for own in rates]) for name in names]


def _cell(values: Sequence[float], base: Sequence[float], form: Form, unit: str) -> dict[str, str]:
    if not values:
        return {"value": NONE, "reach": "", "difference": ""}
    low, high = (number(bound(values), form) for bound in (min, max))
    return {
        "value": f"{number(fmean(values), form)}{unit}",
        "reach": f"{low} to {high}" if len(values) > 1 else "",
        "difference": f"{signed(fmean(values) - fmean(base), form)}{unit}" if base else "",
    }
