"""Pure: what the page of one run, or of several laid over one another, shows.

The runs come from a service's store (pages/run.py) or from folders (pages/report.py, pages/compare.py); both
give a `Run` for each and its curves, and the templates show the same dict.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, get_args

from trainer_backend.collect.losses import FAILED
from trainer_backend.collect.metrics import outcome_name
from trainer_backend.pages.facts import differing_keys, group_seeds
from trainer_backend.pages.panels import (
    PANELS,
    Kind,
    Panel,
    Section,
    merge_outcome,
    rest_of,
    restrict,
    split_by_line,
)
from trainer_backend.pages.run_view import RATES, evaluation_table, key_figures, list_losses, success_rates
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
    last = [{row["kind"]: row for row in run.rows} for run in runs]
    outcomes = {outcome_name(row) for rows in last for kind, row in rows.items() if kind in KINDS}
    outcome = outcomes.pop() if len(outcomes) == 1 else outcome_name(None)
    panels = merge_outcome(restrict(PANELS, pairs), outcome)
    return panels if len(runs) == 1 else split_by_line(panels), rest_of(pairs)


def run_data(runs: Sequence[Run], metrics: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Return what the page shows but for its charts' values: panels by section, and figures and tables of one
    run, or the names and different keys of several.
    """
    panels, rest = panels_for(runs, metrics)
    data = {"sections": sections_of(panels), "rest": rest}
    if len(runs) > 1:
        configs = [run.job.config for run in runs]
        return data | {
            "runs": [{"id": run.job.id, "name": run.name, "state": run.job.state} for run in runs],
            "differs": differing_keys(configs),
            "seeds": any(len(group) > 1 for group in group_seeds(configs)),
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
    groups = group_seeds([run.job.config for run in runs])
    return {
        "charts": charts,
        "runs": [{"id": run.job.id or run.name, "name": run.name} for run in runs],
        "groups": groups,
        **place_on_axes([axes_of(its) for its in whole], charts),
    }  # fmt: skip


def rates_of(curves: Curves) -> dict[str, Series]:
    return {name: series for (kind, name), series in curves.items() if name.startswith(RATES)}
