"""`write_report`: the folder report/ of a run. Everything in it comes from the run's files."""

import os
from collections.abc import Sequence
from pathlib import Path

from trainer_backend.evaluation.outcome import outcome_name
from trainer_backend.report.charts import Picture
from trainer_backend.report.filmstrip import Filmstrip, filmstrip
from trainer_backend.report.learning_charts import capitalized, learning_curve, success_rates
from trainer_backend.report.mixture import policies_chart
from trainer_backend.report.page import Section, page
from trainer_backend.report.replay import FrameSource, played_frames
from trainer_backend.report.story import Story, read_story
from trainer_backend.report.training_charts import reward_per_turn, time_per_stage, update_health
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.layout import RunDirectory

FILE = "report.html"


def write_report(directory: RunDirectory, *, frames: FrameSource = played_frames) -> Path:
    """Write report/report.html and its PNGs; a report that was there before is replaced.

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
    sections = _sections(story)
    film = filmstrip(story, frames)
    path = directory.report / FILE
    save(path, page(story, sections, film), _pictures(sections, film))
    return path


def save(path: Path, html: str, pictures: Sequence[Picture]) -> None:
    """A page, whole or not at all, and its pictures beside it; the folder is made.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    with writing(path.parent):
        path.parent.mkdir(parents=True, exist_ok=True)
        for picture in pictures:
            (path.parent / f"{picture.name}.png").write_bytes(picture.light)
            (path.parent / f"{picture.name}.dark.png").write_bytes(picture.dark)
        aside = path.with_suffix(".tmp")
        aside.write_text(html, encoding="utf-8")
        os.replace(aside, path)


def _sections(story: Story) -> list[Section]:
    no_iteration, no_evaluation = "No iteration has finished yet.", "No evaluation has been done yet."
    told = [
        (
            "Learning curve",
            f"{capitalized(outcome_name(story.told))} an episode: the mean over training episodes of each "
            f"iteration, and over the held-out {story.unit}s of each evaluation, which training never plays. "
            f"Evaluations share their {story.unit}s and sampling seeds.",
            learning_curve(story),
            "Neither an iteration nor an evaluation has finished yet.",
        ),
        *_success(story, no_evaluation),
        (
            "Reward per decision turn",
            "Means over all training episodes of the iterations named; an episode that ended earlier counts "
            "0 at later turns.",
            reward_per_turn(story),
            no_iteration,
        ),
        *_policies(story, no_iteration),
        (
            "Update",
            "KL: how far the updates of one iteration moved the policy. Clip: share of tokens whose "
            "probability ratio was held at its lower or upper bound.",
            update_health(story),
            no_iteration,
        ),
        ("Time", "Wall-clock seconds of each stage.", time_per_stage(story), "No stage has finished yet."),
    ]
    return [Section(title, text, picture, missing) for title, text, picture, missing in told]


def _success(story: Story, missing: str) -> list[tuple[str, str, Picture | None, str]]:
    """Of an environment with achievements; before the first evaluation nobody knows whether it has some."""
    if story.told is not None and not any(row.get("eval/success_rates") for row in story.evaluations):
        return []
    text = (
        "Share of held-out episodes that unlocked it. The best evaluation is the one with the highest mean "
        "outcome; being chosen, it flatters itself a little."
    )
    return [("Success rate of each achievement", text, success_rates(story), missing)]


def _policies(story: Story, missing: str) -> list[tuple[str, str, Picture | None, str]]:
    """Of a mixture; what a fixed policy played stands in no other section."""
    if not story.job.fixed_policies:
        return []
    text = (
        "Who played the training episodes of each iteration, and what they were worth; and as how many "
        "of the actor's own the samples of a fixed policy count, truncated as they are."
    )
    return [("Policies", text, policies_chart(story), missing)]


def _pictures(sections: Sequence[Section], film: Filmstrip | None) -> list[Picture]:
    found = [section.picture for section in sections] + [film.picture if film else None]
    return [picture for picture in found if picture is not None]
