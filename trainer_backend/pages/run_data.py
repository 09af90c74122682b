"""Pure: what the page of one run, or of several laid over one another, shows.

The runs come from a service's store (pages/run.py) or from folders (pages/report.py, pages/compare.py); both
give a `Run` for each and its curves, and the templates show the same dict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from statistics import fmean
from typing import Any, get_args

from trainer_backend.collect.losses import FAILED
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.pages.facts import differing_keys, group_seeds
from trainer_backend.pages.figures import NONE, number, signed
from trainer_backend.pages.panels import (
    PANELS,
    Form,
    Kind,
    Panel,
    Section,
    merge_outcome,
    rest_of,
    restrict,
    split_by_line,
)
from trainer_backend.pages.run_view import (
    FIGURES,
    RATES,
    evaluation_table,
    key_figures,
    list_losses,
    success_rates,
)
from trainer_backend.pages.series import Chart, Curves, axes_of, chart_of, place_on_axes
from trainer_backend.pages.timeline import SHOWN, timeline_of
from trainer_backend.store.rows import CheckpointRow, JobRow, Series

KINDS = get_args(Kind)
MOST_LOSSES = 50  # stages that the page lists
_POINTS, _LEAST_POINTS = 400, 100  # a chart is some 400 pixels wide


@dataclass(frozen=True, slots=True)
class Run:
    """A run to show."""

    job: JobRow
    name: str
    """No other run of the page has it."""
    rows: Sequence[Mapping[str, Any]]
    """Rows of metrics, the oldest first: all, or the first and the last iterations, the evaluations, and the
    stages that lost rollouts. Of several runs the last of each kind is enough."""
    rates: Mapping[str, Series] = field(default_factory=dict)
    """Curves of success rates over the evaluations, by metric."""
    best: int | None = None
    """The iteration of the best checkpoint."""
    checkpoints: Sequence[CheckpointRow] = ()


def points_for(runs: int) -> int:
    """The most points of a curve where so many runs share a chart."""
    return max(_POINTS // runs, _LEAST_POINTS)


def panels_for(runs: Sequence[Run], metrics: Iterable[tuple[str, str]]) -> tuple[list[Panel], list[Panel]]:
    """Return the panels for these metrics, and generated panels for metrics that no panel names.

    Args:
        metrics: (kind, metric) pairs that any of the runs has.
    """
    pairs = sorted(pair for pair in metrics if pair[0] in KINDS)
    panels = merge_outcome(restrict(PANELS, pairs), name_outcome(runs))
    return panels if len(runs) == 1 else split_by_line(panels), rest_of(pairs)


def name_outcome(runs: Sequence[Run]) -> str:
    """The name that all runs give to the outcome of an episode, or just "outcome"."""
    last = [{row["kind"]: row for row in run.rows} for run in runs]
    names = {outcome_name(row) for rows in last for kind, row in rows.items() if kind in KINDS}
    return names.pop() if len(names) == 1 else outcome_name(None)


def run_data(
    runs: Sequence[Run], metrics: Iterable[tuple[str, str]], *, apart: bool = False, pin: str = ""
) -> dict[str, Any]:
    """Return what the page shows but for its charts' values: panels by section, and figures and tables of one
    run, or the names, last figures and different keys of several.

    Args:
        apart: runs of one setting with different seeds are not shown as one.
        pin: the id or the name of the run to which the last figures of the others are compared.
    """
    panels, rest = panels_for(runs, metrics)
    data = {"sections": sections_of(panels), "rest": rest}
    if len(runs) > 1:
        groups = name_groups(runs)
        sign = {at: group["runs"][0] for group in groups for at in group["runs"] if not apart}
        return data | {
            "runs": [
                {
                    "id": run.job.id or run.name,
                    "name": run.name,
                    "state": run.job.state,
                    "sign": sign.get(at, at),
                }
                for at, run in enumerate(runs)
            ],
            "differs": differing_keys([run.job.config for run in runs]),
            "seeds": len(groups) < len(runs),
            "last": last_values(runs, groups if not apart else _each_alone(runs), pin),
        }
    (run,) = runs
    iterations, evaluations = (
        [row for row in run.rows if row["kind"] == kind] for kind in ("iteration", "evaluation")
    )
    lossy = [row for row in run.rows if any(row.get(name) for name in FAILED)]
    return data | {
        "key": key_figures(iterations, evaluations, outcome_name((evaluations or iterations or [None])[-1])),
        "rates": success_rates(evaluations, run.rates),
        "evaluations": evaluation_table(evaluations, run.best),
        "timeline": timeline_of(iterations[-SHOWN:], evaluations),
        "losses": list_losses(lossy[-MOST_LOSSES:]),
        "checkpoints": run.checkpoints,
    }


def sections_of(panels: Sequence[Panel] | Sequence[Chart]) -> list[dict[str, Any]]:
    """Group panels, or charts, by their sections; a section without any is left out."""
    keyed = [panel if isinstance(panel, dict) else {"section": panel.section} for panel in panels]
    sections = [
        {
            "id": "of-" + title.lower().replace(" ", "-"),
            "title": title,
            "panels": [panel for panel, its in zip(panels, keyed, strict=True) if its["section"] == title],
        }
        for title in filter(None, get_args(Section))
    ]
    return [section for section in sections if section["panels"]]


def chart_data(
    runs: Sequence[Run], curves: Sequence[Curves], whole: Sequence[Curves], panels: Iterable[Panel]
) -> dict[str, Any]:
    """Return what static/charts.js draws: charts that have values, the runs, groups of seeds, and the axes.

    Args:
        curves: of each run, thinned to `points_for` points.
        whole: AXIS_METRICS of each run, not thinned.
    """
    named = [(run.name, its) for run, its in zip(runs, curves, strict=True)]
    charts = [chart for chart in (chart_of(panel, named) for panel in panels) if chart is not None]
    return {
        "charts": charts,
        "runs": [{"id": run.job.id or run.name, "name": run.name} for run in runs],
        "groups": name_groups(runs),
        **place_on_axes([axes_of(its) for its in whole], charts),
    }


def name_groups(runs: Sequence[Run]) -> list[dict[str, Any]]:
    """Return runs of one setting with different seeds as a `name` and `runs`, their indices; others alone."""
    groups = group_seeds([run.job.config for run in runs])
    return [{"name": _name_group([runs[at].name for at in group]), "runs": group} for group in groups]


def _each_alone(runs: Sequence[Run]) -> list[dict[str, Any]]:
    return [{"name": run.name, "runs": [at]} for at, run in enumerate(runs)]


def _name_group(names: Sequence[str]) -> str:
    """What the names begin with, and how many they are: `grpo_seed (3 seeds)`."""
    if len(names) == 1:
        return names[0]
    begin = commonprefix(names).rstrip("-_./ ")  # noqa: RUF071 (of names, not of paths)
    return f"{begin or names[0]} ({len(names)} seeds)"


def last_values(runs: Sequence[Run], groups: Sequence[Mapping[str, Any]], pin: str) -> dict[str, Any]:
    """Return the last figures of runs, or means over seeds, and their differences to those of the pinned run.

    Returns:
        `figures`: the names; `rows`: for each group its `name`, whether it is `pinned`, and `cells`: a value,
        of several seeds the lowest and highest in `reach`, and the `difference`; texts, empty if absent.
    """
    last = [
        {
            name: value
            for row in run.rows
            if row["kind"] in ("iteration", "evaluation")
            for name, value in row.items()
        }
        for run in runs
    ]
    figures = [figure for figure in FIGURES if any(row.get(figure[1]) is not None for row in last)]
    values = [
        [
            [last[at][metric] for at in group["runs"] if last[at].get(metric) is not None]
            for _, metric, *_ in figures
        ]
        for group in groups
    ]
    pinned = next((at for at, run in enumerate(runs) if pin and pin in (run.job.id, run.name)), None)
    base = next((own for group, own in zip(groups, values, strict=True) if pinned in group["runs"]), None)
    return {
        "figures": [name.format(outcome=name_outcome(runs)) for name, *_ in figures],
        "rows": [
            {
                "name": group["name"],
                "pinned": own is base,
                "cells": [
                    _cell(seeds, base[at] if base and own is not base else (), figure)
                    for at, (seeds, figure) in enumerate(zip(own, figures, strict=True))
                ],
            }
            for group, own in zip(groups, values, strict=True)
        ],
    }


def _cell(
    values: Sequence[float], base: Sequence[float], figure: tuple[str, str, Form, str]
) -> dict[str, str]:
    _, _, form, unit = figure
    if not values:
        return {"value": NONE, "reach": "", "difference": ""}
    low, high = (number(bound(values), form) for bound in (min, max))
    return {
        "value": f"{number(fmean(values), form)}{unit}",
        "reach": f"{low} to {high}" if len(values) > 1 else "",
        "difference": f"{signed(fmean(values) - fmean(base), form)}{unit}" if base else "",
    }


def rates_of(curves: Curves) -> dict[str, Series]:
    return {name: series for (kind, name), series in curves.items() if name.startswith(RATES)}
