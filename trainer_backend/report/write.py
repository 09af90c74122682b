"""`write_report`: the dashboard's page of a run, saved as one HTML file, from the run's files alone."""

import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from trainer_backend.dashboard.config_view import chosen_keys
from trainer_backend.dashboard.key_view import ends_of
from trainer_backend.dashboard.panels import Panel
from trainer_backend.dashboard.rates_view import RATES
from trainer_backend.dashboard.rendering import saved_page
from trainer_backend.dashboard.run_data import POINTS, charts_of, panels_for
from trainer_backend.dashboard.run_pages import figures_of
from trainer_backend.dashboard.run_view import head_of
from trainer_backend.dashboard.series import Chart, Curve, curves_of
from trainer_backend.job import dump_job
from trainer_backend.report.filmstrip import filmstrip
from trainer_backend.report.replay import FrameSource, played_frames
from trainer_backend.report.stored_episodes import reward_by_turn
from trainer_backend.report.story import Row, Story, read_story
from trainer_backend.report.summary import figure_lines
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.state import read_state, watch
from trainer_backend.store.rows import JobRow
from trainer_backend.store.states import state_of_run
from trainer_backend.store.sync_checkpoints import checkpoint_rows

FILE = "report.html"
_WINDOW = 3  # iterations averaged at each end of the run: a single one is too noisy to compare

Lines = Sequence[tuple[str, Sequence[float]]]  # of a chart: what the legend says, and values by turn


def write_report(directory: RunDirectory, *, frames: FrameSource = played_frames) -> Path:
    """Write report/report.html; a report that was there before is replaced.

    A run that has only begun gets one that says what is missing. Blocks; where an event loop runs, call it
    on a thread.

    Args:
        directory: the run.
        frames: draws the filmstrip; by default a task app does, over HTTP.

    Returns:
        The HTML file.

    Raises:
        JobError: job.toml of the run cannot be read.
        RunDirectoryError: the disk is full, or refuses.
    """
    story = read_story(directory)
    return save(directory.report / FILE, _page(directory, story, frames))


def save(path: Path, html: bytes) -> Path:
    """Write a page, whole or not at all; the folder is made.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        aside.write_bytes(html)
        os.replace(aside, path)
    return path


def _page(directory: RunDirectory, story: Story, frames: FrameSource) -> bytes:
    curves = curves_of(story.rows, points=POINTS)
    shown, rest = panels_for(curves, {story.outcome}, runs=1)
    by_turn = turn_charts(story)
    charts, others = (charts_of([(story.job.job.name, curves)], panels) for panels in (shown, rest))
    job = _job_row(directory, story)
    return saved_page(
        "run",
        [*charts, *by_turn, *others],
        panels=[*shown, *(chart.panel for chart in by_turn)],
        rest=len(rest),
        rest_panels=rest,
        lines=(),
        checkpoints=checkpoint_rows(directory.checkpoints),
        head=head_of(
            job, read_state(directory.path), iteration=len(story.iterations), rate_s=None, place="",
            now=job.created, can_control=False,
        ),
        figures=figure_lines(story),
        film=filmstrip(story, frames),
        differs=chosen_keys(job),
        toml=job.config,
        saved_at=job.created,
        **figures_of(
            ends_of(story.iterations),
            story.evaluations,
            {name: series for (_, name), series in curves.items() if name.startswith(RATES)},
        ),
    )  # fmt: skip


def _job_row(directory: RunDirectory, story: Story) -> JobRow:
    """The run as the store of a service would have it."""
    state, code, detail = state_of_run(watch(directory.path))
    return JobRow(
        number=0, id="", name=story.job.job.name, state=state, wanted="run", config=dump_job(story.job),
        run_dir=str(directory.path), run_id=directory.run_id, origin="cli", home="", tags={}, attempt=1,
        created=datetime.now(UTC), started=None, ended=None, code=code, detail=detail, version=0,
    )  # fmt: skip


def turn_charts(story: Story) -> list[Chart]:
    """What was achieved and paid by decision turn: the first iterations beside the last ones."""
    windows = _windows(story.by_actor)
    if not windows:
        return []
    rewards = [(label, _rewards(story, rows)) for label, rows in windows]
    note = "r_t that training used, mean a decision; an episode that ended earlier counts 0."
    paid = _turn_chart("reward_by_turn", "Reward by decision turn", note, rewards)
    achieved = _achieved_by_turn(windows)
    return [_turn_chart("achieved_by_turn", *achieved), paid] if achieved else [paid]


def _turn_chart(key: str, title: str, note: str, lines: Lines) -> Chart:
    longest = max(len(values) for _, values in lines)
    curves = tuple(
        Curve(label, 0, line, False, (*values, *[None] * (longest - len(values))))
        for line, (label, values) in enumerate(lines)
    )
    return Chart(Panel(key, title, note, (), x="decision turn"), tuple(range(1, longest + 1)), curves)


def _windows(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """The first and the last iterations, never overlapping."""
    size = min(_WINDOW, len(rows) // 2)
    if size == 0:
        return [(_span(rows), rows)] if rows else []
    return [(_span(part), part) for part in (rows[:size], rows[-size:])]


def _span(rows: Sequence[Row]) -> str:
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _achieved_by_turn(windows: Sequence[tuple[str, Sequence[Row]]]) -> tuple[str, str, Lines] | None:
    """First unlocks where there are achievements; in dialogues what had been scored by then; else nothing."""
    rows = [row for _, part in windows for row in part]
    if all("episode/unique_achievements" in row for row in rows):
        note = "Achievements unlocked for the first time, mean a decision."
        return "First unlocks by decision turn", note, _by_turn(windows, "decision/unique_by_turn")
    if all("interaction/score_by_turn" in row for row in rows):
        note = "Last score up to each turn, mean an episode."
        return "Score by decision turn", note, _by_turn(windows, "interaction/score_by_turn")
    return None


def _by_turn(windows: Sequence[tuple[str, Sequence[Row]]], name: str) -> Lines:
    return [(label, _mean_by_turn([row[name] for row in rows])) for label, rows in windows]


def _mean_by_turn(lists: Sequence[Sequence[float]]) -> list[float]:
    longest = max(map(len, lists))
    return [sum(values[t] for values in lists if t < len(values)) / len(lists) for t in range(longest)]


def _rewards(story: Story, rows: Sequence[Row]) -> list[float]:
    paths = [story.rollouts_file(f"iteration_{row['iteration']}") for row in rows]
    return reward_by_turn([path for path in paths if path is not None], story.job.job.name)
