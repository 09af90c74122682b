"""What the pages of a run read from the store and its directory, a few queries each."""

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from trainer_backend.dashboard.job_facts import folder_of
from trainer_backend.dashboard.key_view import Ends
from trainer_backend.dashboard.panels import (
    PANELS,
    Panel,
    found_in,
    metrics_of,
    named_by,
    one_line_each,
    rest_of,
)
from trainer_backend.dashboard.run_view import Head, head_of, seconds_an_iteration
from trainer_backend.dashboard.series import Chart, Curves, chart_of
from trainer_backend.dashboard.services import Dashboard
from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.rundir.run_log import FILE as LOG
from trainer_backend.rundir.state import read_state
from trainer_backend.store import jobs, reads
from trainer_backend.store.database import Store
from trainer_backend.store.rows import JobRow

POINTS = 400  # of all runs of a chart together, and one run has as many: it is some 400 pixels wide
_MOST_EVALUATIONS = 10_000
_STAGES = ("time/collect_s", "time/credit_s", "time/update_s", "time/publish_s")
_KINDS = ("iteration", "evaluation")


def head(dashboard: Dashboard, job_id: str) -> Head:
    """
    Raises:
        UnknownJob: there is none of that id.
    """
    job = jobs.get(dashboard.store, job_id)
    place = _place(dashboard.store, job)  # before anything else is read: what comes meanwhile is then news
    (summary,) = reads.summaries(dashboard.store, [job], ())
    times = reads.series(dashboard.store, [job_id], _STAGES)[job_id] if job.state == "running" else {}
    state = read_state(Path(job.run_dir)) if job.run_dir else None
    return head_of(
        job, state, iteration=summary.iteration, rate_s=seconds_an_iteration(times), place=place,
        now=dashboard.clock(), can_control=dashboard.jobs is not None,
    )  # fmt: skip


def panels_of(store: Store, job_ids: Sequence[str]) -> tuple[list[Panel], list[Panel]]:
    """The panels that these runs have something for, and those of all that stands in none of them."""
    of_runs = reads.last_lines(store, job_ids, _KINDS).values()
    names = {outcome_name(_row(line)) for lines in of_runs for line in lines.values()}
    return panels_for(reads.known_metrics(store, job_ids), names, runs=len(job_ids))


def panels_for(
    metrics: Iterable[tuple[str, str]], outcomes: Collection[str], *, runs: int
) -> tuple[list[Panel], list[Panel]]:
    """The panels of runs that have these metrics, and those of all that stands in none of them.

    Args:
        metrics: (kind, metric) pairs.
        outcomes: what the runs call their outcome; where they differ in that, it is just that.
    """
    known = sorted(known for known in metrics if known[0] in _KINDS)
    outcome = next(iter(outcomes)) if len(outcomes) == 1 else outcome_name(None)
    found = named_by(found_in(PANELS, known), outcome)
    return found if runs == 1 else one_line_each(found), rest_of(known)


def charts(store: Store, runs: Sequence[JobRow], panels: Sequence[Panel]) -> list[Chart]:
    """Panels with their values; two queries for all of them and all runs."""
    ids = [job.id for job in runs]
    found = {
        kind: reads.series(store, ids, _names(panels, kind), kind=kind, points=POINTS // len(runs))
        for kind in _KINDS
    }
    named: list[tuple[str, Curves]] = [
        (name, {(kind, metric): series for kind in _KINDS for metric, series in found[kind][job.id].items()})
        for name, job in zip(names_of(runs), runs, strict=True)
    ]
    return charts_of(named, panels)


def charts_of(runs: Sequence[tuple[str, Curves]], panels: Iterable[Panel]) -> list[Chart]:
    """The panels that have values in one of the runs, which are given by name."""
    drawn = (chart_of(panel, runs) for panel in panels)
    return [chart for chart in drawn if chart is not None]


def names_of(runs: Sequence[JobRow]) -> list[str]:
    """Names that tell the runs apart: the job's, with the folder's where two are called the same."""
    names = [job.name for job in runs]
    return [job.name if names.count(job.name) == 1 else folder_of(job) for job in runs]


def iteration_ends(store: Store, job_id: str) -> Ends:
    """The first and the last iteration."""
    first = reads.metric_lines(store, job_id, kind="iteration", limit=1)
    last = reads.last_line(store, job_id, "iteration")
    return Ends(_row(first[0]) if first else None, _row(last) if last else None)


def evaluations(store: Store, job_id: str) -> list[dict[str, Any]]:
    """All of them, oldest first."""
    found = reads.metric_lines(store, job_id, kind="evaluation", limit=_MOST_EVALUATIONS)
    return [_row(line) for line in found]


def _place(store: Store, job: JobRow) -> str:
    """How far the store and the log have come, as the stream of events counts it (api/events_routes.py)."""
    lines = reads.last_lines(store, [job.id], _KINDS)[job.id].values()
    row = max((line.number for line in lines), default=0)
    return f"{row}.{_size(Path(job.run_dir) / LOG) if job.run_dir else 0}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _row(line: Any) -> dict[str, Any]:
    return {**line.row, "kind": line.kind, "iteration": line.iteration}


def _names(panels: Sequence[Panel], kind: str) -> list[str]:
    return sorted(
        {name for panel in panels for line in panel.lines if line.kind == kind for name in metrics_of(line)}
    )
