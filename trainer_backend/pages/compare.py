"""`write_comparison`: the dashboard's page of runs laid over one another, saved as one HTML file."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from trainer_backend.collect.metrics import outcome_interval, outcome_name
from trainer_backend.core.intervals import wilson_interval
from trainer_backend.core.statistics import Interval
from trainer_backend.errors import JobError
from trainer_backend.job.load import dump_job
from trainer_backend.pages.facts import differing_keys
from trainer_backend.pages.figures import spaced
from trainer_backend.pages.page import saved_page
from trainer_backend.pages.report import paired_difference, save
from trainer_backend.pages.run import DASHES, POINTS, charts_of, panels_for
from trainer_backend.pages.series import curves_of
from trainer_backend.pages.story import Row, Story, read_story
from trainer_backend.rundir.layout import open_run
from trainer_backend.rundir.state import read_status
from trainer_backend.store.jobs import state_of_run
from trainer_backend.store.rows import JobState

# Runs side by side, read from their files: what was set differently, and by how much results differ.

# Where these differ, the same seed is another task, and a difference is not the policy's alone.
_TASK = (
    "rollout.env_name", "rollout.env_config.", "rollout.max_turns", "rollout.max_invalid_decisions",
    "rollout.termination_regex", "rollout.termination_target", "multi_turn.", "data.path", "data.split",
    "data.evaluation_", "data.held_out_", "data.interaction",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Side:
    """A run of the comparison, under a name that no other one has."""

    name: str
    story: Story
    state: JobState

    @property
    def last(self) -> Row | None:
        """The last evaluation; None before there is one."""
        return self.story.evaluations[-1] if self.story.evaluations else None

    @property
    def outcome(self) -> str | None:
        """The name of the run's outcome; None before it has one."""
        return outcome_name(self.story.told) if self.story.told is not None else None


@dataclass(frozen=True, slots=True)
class Paired:
    """A run's last evaluation minus the first run's, world by world.

    Attributes:
        found: in outcomes; None without worlds that both played.
        doubt: settings that differ and make the same world another task; empty when none does.
    """

    found: Interval | None
    doubt: tuple[str, ...]


def read_sides(paths: Sequence[Path]) -> list[Side]:
    """The runs in these folders, named by as much of their paths as tells them apart.

    Raises:
        JobError: fewer than two, one given twice, or a job.toml that cannot be read.
        RunDirectoryError: a folder holds no run.
    """
    whole = [path.resolve() for path in paths]
    if len(whole) < 2:
        raise JobError("a comparison needs at least two runs; `turnwise report RUN` tells of one")
    twice = next((path for path in whole if whole.count(path) > 1), None)
    if twice is not None:
        raise JobError(f"{twice} is given twice; a run compared with itself tells nothing")
    return [
        Side(name, read_story(open_run(path)), state_of_run(read_status(path))[0])
        for name, path in zip(_names(whole), paths, strict=True)
    ]


def setting_differences(sides: Sequence[Side]) -> list[tuple[str, list[str]]]:
    return differing_keys([dump_job(side.story.job) for side in sides])


def outcome_of(sides: Sequence[Side]) -> str:
    """Return the name of the runs' outcome, or "outcome" if they differ."""
    names = {side.outcome for side in sides} - {None}
    return str(names.pop()) if len(names) == 1 else "outcome"


def achievements(sides: Sequence[Side]) -> list[str]:
    """All names in the last evaluations, the rarest of the first run that has one first."""
    rates = [side.last.get("eval/success_rates", {}) for side in sides if side.last is not None]
    names = {name for row in rates for name in row}
    return sorted(names, key=lambda name: (*(row.get(name, 0.0) for row in rates), name))


def against_first(sides: Sequence[Side]) -> list[Paired | None]:
    """The paired difference of every run and the first one; None for the first itself."""
    first = sides[0]
    return [None if side is first else _paired(first, side) for side in sides]


def _paired(first: Side, other: Side) -> Paired:
    before, after = (_stored(side) for side in (first, other))
    found = paired_difference(before, after) if before and after else None
    doubt = [key for key, _ in setting_differences([first, other]) if key.startswith(_TASK)]
    if first.story.job.evaluation_temperature != other.story.job.evaluation_temperature:
        doubt.append("evaluation.temperature")
    return Paired(found, tuple(doubt))


def _stored(side: Side) -> Path | None:
    return side.story.rollouts_file(f"evaluation_{side.last['iteration']}") if side.last else None


def _names(paths: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ from one another."""
    for parts in range(1, max(len(path.parts) for path in paths) + 1):
        names = [str(Path(*path.parts[-parts:])) for path in paths]
        if len(set(names)) == len(names):
            return names
    raise AssertionError("paths that differ have names that differ")


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
    """Return a sentence for each reason to doubt that the two policies cause the differences."""
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
