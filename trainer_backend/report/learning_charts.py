"""Charts of what was learned: outcomes over iterations, success rate of each achievement."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trainer_backend.core.statistics import Interval
from trainer_backend.evaluation.outcome import outcome_interval, outcome_name
from trainer_backend.report.charts import Picture, Theme, from_zero, picture, plain, whole_numbers
from trainer_backend.report.marks import arms, band, rate_points
from trainer_backend.report.stored_episodes import outcome_of_groups
from trainer_backend.report.story import Row, Story

_LABEL_CHARS = 40


def learning_curve(story: Story) -> Picture | None:
    """Training episodes and held-out evaluations; None before there are any.

    Iteration k is drawn at k - 1: its episodes were played by the policy after k - 1 updates.
    """
    if not story.by_actor and not story.evaluations:
        return None
    training = [(row["iteration"] - 1, _training_interval(story, row)) for row in story.by_actor]
    held_out = [(row["iteration"], outcome_interval(row)) for row in story.evaluations]
    measured = f"{outcome_name(story.told)} an episode"

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        band(axes, training, colour=theme.series[0], label="training episodes (band: 95 %, groups)")
        _bars(axes, held_out, theme.series[1], "held-out ones (bars: 95 %)")
        axes.set_xlabel("iterations finished when the episodes were played")
        axes.set_ylabel(textwrap.fill(plain(measured), _LABEL_CHARS))
        from_zero(axes)
        axes.xaxis.set_major_locator(whole_numbers())
        figure.legend(loc="outside upper left", ncols=2)

    alt = "; ".join(_told(name, found) for name, found in _named(training, held_out) if found)
    return picture("learning_curve", f"Line chart of {measured}. {alt}.", draw, height_in=3.6)


def success_rates(story: Story) -> Picture | None:
    """Rate of each achievement on held-out worlds, first evaluation against the best and the last one.

    None without an evaluation, and where its environment has no achievements.
    """
    best = story.best_evaluation
    if best is None or not best.get("eval/success_rates"):
        return None
    first = story.evaluations[0]
    shown = [(_label(words, row), row) for words, row in story.landmarks]
    rates: Mapping[str, float] = best["eval/success_rates"]
    names = sorted(rates, key=lambda name: (rates[name], first["eval/success_rates"].get(name, 0.0)))

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for index, (label, row) in enumerate(shown):
            offset = (index - (len(shown) - 1) / 2) * -0.24
            rate_points(
                axes, names, row, offset=offset, label=label, colour=theme.series[index], marker="osD"[index]
            )
        axes.set_yticks(range(len(names)), [spaced(name) for name in names])
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.set_xlim(-0.02, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("episodes that unlocked it (bars: 95 %)")
        figure.legend(loc="outside upper right", ncols=len(shown))

    told = ", ".join(f"{spaced(name)} {rates[name]:.0%}" for name in reversed(names) if rates[name] > 0)
    alt = f"Success rate of each achievement; {_label('best', best)}: {told or 'none was unlocked'}."
    return picture("success_rates", alt, draw, height_in=1.1 + 0.27 * len(names))


def spaced(name: str) -> str:
    return name.replace("_", " ")


def capitalized(text: str) -> str:
    """As a sentence begins; the rest stays as it is."""
    return text[:1].upper() + text[1:]


def _training_interval(story: Story, row: Row) -> Interval:
    path = story.rollouts_file(f"iteration_{row['iteration']}")
    found = outcome_of_groups(path, story.job.job.name) if path else None
    mean = row["episode/outcome_reward"]
    return Interval(mean, found.low, found.high, found.count) if found else Interval(mean, None, None, 0)


def _bars(axes: Any, points: Sequence[tuple[int, Interval]], colour: str, label: str) -> None:
    if not points:
        return
    axes.errorbar(
        [at for at, _ in points],
        [found.mean for _, found in points],
        yerr=arms([found for _, found in points]),
        color=colour, marker="s", linestyle="--", capsize=4, label=label,
    )  # fmt: skip


def _label(words: str, row: Row) -> str:
    return f"{words} (iteration {row['iteration']})"


def _named(*series: Sequence[tuple[int, Interval]]) -> list[tuple[str, Sequence[tuple[int, Interval]]]]:
    return list(zip(("Training", "Held-out"), series, strict=True))


def _told(name: str, points: Sequence[tuple[int, Interval]]) -> str:
    first, last = points[0], points[-1]
    begin = f"{name}: {first[1].mean:.2f} after {first[0]} iterations"
    return begin if first is last else f"{begin}, {last[1].mean:.2f} after {last[0]}"
