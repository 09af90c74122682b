"""`write_comparison`: a folder with one HTML file and its pictures, for runs side by side."""

from collections.abc import Sequence
from pathlib import Path

from trainer_backend.core.proportions import wilson_interval
from trainer_backend.core.statistics import Interval
from trainer_backend.evaluation.outcome import outcome_interval
from trainer_backend.report.comparison import Paired, Side, against_first, outcome_of, setting_differences
from trainer_backend.report.comparison_charts import (
    achievements,
    entropies,
    held_out_curves,
    success_rates_side_by_side,
    training_curves,
)
from trainer_backend.report.learning_charts import capitalized, spaced
from trainer_backend.report.page import Section, render
from trainer_backend.report.write import save

FILE = "comparison.html"
_NONE = "-"


def write_comparison(sides: Sequence[Side], folder: Path) -> Path:
    """Write comparison.html and its PNGs; what was there before is replaced.

    Returns:
        The HTML file.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    sections = _sections(sides)
    html = render(
        "comparison.html.jinja",
        title="comparison of " + ", ".join(side.name for side in sides),
        names=[side.name for side in sides],
        columns=summary_columns(sides),
        summary=summary_rows(sides),
        doubts=doubts(sides),
        settings=setting_differences(sides),
        sections=sections,
        rates=_rate_rows(sides),
    )
    path = folder / FILE
    save(path, html, [section.picture for section in sections if section.picture is not None])
    return path


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


def _sections(sides: Sequence[Side]) -> list[Section]:
    measured = capitalized(outcome_of(sides))
    no_iteration, no_evaluation = "No run has finished an iteration.", "No run has been evaluated."
    told = [
        (
            "Held-out episodes",
            f"{measured} an episode: mean and 95 % band of each evaluation.",
            held_out_curves(sides),
            no_evaluation,
        ),
        (
            "Training episodes",
            f"{measured} an episode: mean of each iteration's episodes, drawn at the iterations that "
            "their policy had behind it.",
            training_curves(sides),
            no_iteration,
        ),
        ("Entropy", "Of the policy, mean over an iteration's updates.", entropies(sides), no_iteration),
    ]
    if achievements(sides) or not any(side.last for side in sides):
        told.append(
            (
                "Success rate of each achievement",
                "Share of held-out episodes that unlocked it, in each run's last evaluation.",
                success_rates_side_by_side(sides),
                no_evaluation,
            )
        )
    return [Section(title, text, picture, missing) for title, text, picture, missing in told]
