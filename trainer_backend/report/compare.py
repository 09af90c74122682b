"""`write_comparison`: the dashboard's page of runs laid over one another, saved as one HTML file."""

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainer_backend.core.proportions import wilson_interval
from trainer_backend.core.statistics import Interval
from trainer_backend.dashboard.figures import spaced
from trainer_backend.dashboard.rendering import saved_page
from trainer_backend.dashboard.run_data import POINTS, charts_of, panels_for
from trainer_backend.dashboard.run_pages import DASHES
from trainer_backend.dashboard.series import curves_of
from trainer_backend.evaluation.outcome import outcome_interval
from trainer_backend.report.comparison import (
    Paired,
    Side,
    achievements,
    against_first,
    outcome_of,
    setting_differences,
)
from trainer_backend.report.write import save

FILE = "comparison.html"
_NONE = "-"


def write_comparison(sides: Sequence[Side], folder: Path) -> Path:
    """Write comparison.html; what was there before is replaced.

    Returns:
        The HTML file.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    runs = [(side.name, curves_of(side.story.rows, points=POINTS // len(sides))) for side in sides]
    shown, _ = panels_for({key for _, curves in runs for key in curves}, {outcome_of(sides)}, runs=len(sides))
    charts = charts_of(runs, shown)
    html = saved_page(
        "compare",
        charts,
        panels=[chart.panel for chart in charts],
        overlaid=[
            {"name": side.name, "state": side.state, "dashes": DASHES[(at + at // 6) % 6], "without": ""}
            for at, side in enumerate(sides)
        ],
        live=False,
        columns=summary_columns(sides),
        summary=summary_rows(sides),
        doubts=doubts(sides),
        differs=setting_differences(sides),
        rates=_rate_rows(sides),
        saved_at=datetime.now(UTC),
    )
    return save(folder / FILE, html)


def summary_columns(sides: Sequence[Side]) -> list[str]:
    """What stands in each cell of `summary_rows`."""
    score = ["score"] if _have_score(sides) else []
    return ["run", "done", "at", f"{outcome_of(sides)} (95 %)", *score, "minus the first (95 %)", "episodes"]


def summary_rows(sides: Sequence[Side]) -> list[Sequence[str]]:
    """A row a run: how far it is, its last evaluation, and the difference to the first run."""
    scored = _have_score(sides)
    return [
        _summary(side, paired, scored=scored)
        for side, paired in zip(sides, against_first(sides), strict=True)
    ]


def doubts(sides: Sequence[Side]) -> list[str]:
    """What speaks against reading the differences as those of two policies, a sentence each."""
    first = sides[0].name
    evaluated = {side.last["iteration"] for side in sides if side.last is not None}
    uneven = "the last evaluations are after different numbers of iterations"
    measures = dict.fromkeys(side.outcome for side in sides if side.outcome is not None)
    other = f"the figures are not of one kind: {'; '.join(measures)}"
    return (
        [uneven] * (len(evaluated) > 1)
        + [other] * (len(measures) > 1)
        + [
            f"{side.name} against {first}: {', '.join(paired.doubt)} differ, so the same world is another "
            "task, and the difference is not the policy's alone"
            for side, paired in zip(sides, against_first(sides), strict=True)
            if paired is not None and paired.doubt
        ]
    )


def _summary(side: Side, paired: Paired | None, *, scored: bool) -> Sequence[str]:
    done = f"{len(side.story.iterations)} of {side.story.job.training.iterations}"
    row = side.last
    if row is None:
        return (side.name, done, *[_NONE] * (5 if scored else 4))
    found = paired.found if paired else None
    score = row.get("eval/crafter_score")
    return (
        side.name,
        done,
        str(row["iteration"]),
        _told(outcome_interval(row), "{:.2f}"),
        *([_NONE if score is None else f"{score:.1f} %"] if scored else []),
        _told(found, "{:+.2f}") if found else _NONE,
        str(found.count if found else row["eval/episodes"]),
    )


def _have_score(sides: Sequence[Side]) -> bool:
    return any(side.last is not None and "eval/crafter_score" in side.last for side in sides)


def _told(found: Interval, form: str) -> str:
    if found.low is None or found.high is None:
        return form.format(found.mean)
    return f"{form.format(found.mean)} ({form.format(found.low)} to {form.format(found.high)})"


def _rate_rows(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    """Success rates of the last evaluations with Wilson intervals, the most frequent first."""
    return [(spaced(name), [_rate(side, name) for side in sides]) for name in reversed(achievements(sides))]


def _rate(side: Side, name: str) -> str:
    if side.last is None:
        return _NONE
    count = int(side.last["eval/episodes"])
    rate = side.last.get("eval/success_rates", {}).get(name, 0.0)
    return _told(wilson_interval(round(rate * count), count), "{:.0%}")
