"""Charts of how training went: reward per decision turn, the update's health, where the time went."""

from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trainer_backend.report.charts import Picture, Theme, from_zero, picture, seconds, whole_numbers
from trainer_backend.report.stored_episodes import reward_by_turn
from trainer_backend.report.story import EVALUATE_S, Row, Story

_WINDOW = 3  # iterations averaged at each end of the run: a single one is too noisy to compare

_HEALTH = (
    ("entropy, nats a token", (("loss/entropy", "entropy"),)),
    ("KL of an update, nats a token", (("loss/approx_kl", "KL"),)),
    ("tokens held by the clip", (("loss/clip_low_share", "low"), ("loss/clip_high_share", "high"))),
    ("gradient norm", (("optim/grad_norm", "norm"),)),
)
_STAGES = (
    ("time/collect_s", "collect"),
    ("time/update_s", "update"),
    ("time/credit_s", "credit, store"),
    ("time/publish_s", "publish"),
)


# A line of values by turn for each label; a panel is its title, its words and its lines.
Lines = Sequence[tuple[str, Sequence[float]]]
Panel = tuple[str, str, Lines]


def reward_per_turn(story: Story) -> Picture | None:
    """What was achieved and r_t by decision turn, first iterations against the last ones."""
    windows = _windows(story.by_actor)
    if not windows:
        return None
    achieved = _achieved_by_turn(windows)
    paid = [(label, _rewards(story, rows)) for label, rows in windows]
    panels = [*([achieved] if achieved else []), ("reward $r_t$ that training used", "", paid)]
    told = f" {achieved[1]}." if achieved else ""

    def draw(figure: Figure, theme: Theme) -> None:
        drawn = figure.subplots(len(panels), 1, sharex=True, squeeze=False).flat
        for axes, (title, _, lines) in zip(drawn, panels, strict=True):
            _turn_lines(axes, lines, theme)
            axes.set_title(title)
            axes.set_ylabel("mean a decision")
            from_zero(axes)
        figure.axes[-1].set_xlabel("decision turn")
        figure.legend(*figure.axes[0].get_legend_handles_labels(), loc="outside upper right", ncols=2)

    alt = f"Line charts of the reward by decision turn.{told}"
    return picture("reward_per_turn", alt, draw, height_in=0.4 + 2.0 * len(panels))


def update_health(story: Story) -> Picture | None:
    """Entropy, KL, clip shares and gradient norm over iterations."""
    rows = story.iterations
    if not rows:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        for axes, (title, lines) in zip(figure.subplots(2, 2, sharex=True).flat, _HEALTH, strict=True):
            for colour, style, (name, label) in zip(theme.series, ("-", "--"), lines, strict=False):
                found = [(row["iteration"], row[name]) for row in rows if name in row]
                axes.plot(*_columns(found), style, color=colour, marker=".", label=label)
            axes.set_title(title, fontsize=9)
            from_zero(axes)
            axes.xaxis.set_major_locator(whole_numbers())
        clip, norm = figure.axes[2], figure.axes[3]
        clip.yaxis.set_major_formatter(PercentFormatter(1.0))
        clip.legend(loc="best")
        clip.set_xlabel("iteration")
        norm.set_xlabel("iteration")

    first, last = rows[0], rows[-1]
    told = ", ".join(
        f"{label} {first[name]:.3g} to {last[name]:.3g}"
        for name, label in (("loss/entropy", "entropy"), ("loss/approx_kl", "KL"))
        if name in first and name in last
    )
    return picture("update_health", f"Four line charts over iterations: {told}.", draw, height_in=4.2)


def time_per_stage(story: Story) -> Picture | None:
    """Seconds of each stage of the whole run, and of each iteration."""
    totals = stage_totals(story)
    if not totals:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        above, below = figure.subplots(2, 1) if story.iterations else (figure.subplots(), None)
        names = [name for name, _ in reversed(totals)]
        bars = above.barh(names, [value for _, value in reversed(totals)], color=theme.series[0])
        above.bar_label(bars, labels=[seconds(value) for _, value in reversed(totals)], padding=3)
        above.margins(x=0.15)
        above.grid(axis="y", visible=False)
        above.set_title("whole run, seconds")
        if below is not None:
            _stacked(below, story.iterations, theme)

    told = ", ".join(f"{name} {seconds(value)}" for name, value in totals)
    return picture("time_per_stage", f"Bar charts of time: {told}.", draw, height_in=4.8)


def stage_totals(story: Story) -> list[tuple[str, float]]:
    """Seconds of each stage over the whole run; stages that took none are left out."""
    warmups = [row for row in (story.teacher, story.warmup) if row is not None]
    iterations = story.iterations
    totals = [
        ("warm-up: collect", sum(row.get("time/collect_s", 0.0) for row in warmups)),
        ("warm-up: learn", sum(row.get("time/warmup_s", 0.0) for row in warmups)),
        *((f"RL: {label}", sum(row.get(name, 0.0) for row in iterations)) for name, label in _STAGES),
        ("evaluate", story.total(EVALUATE_S)),
    ]
    return [(name, value) for name, value in totals if value > 0]


def _stacked(axes: Any, rows: Sequence[Row], theme: Theme) -> None:
    at = [row["iteration"] for row in rows]
    bottom = [0.0] * len(rows)
    for (name, label), colour, hatch in zip(_STAGES, theme.series, ("", "//", "..", "xx"), strict=False):
        height = [row.get(name, 0.0) for row in rows]
        axes.bar(at, height, bottom=bottom, color=colour, hatch=hatch, edgecolor=theme.ground, label=label)
        bottom = [low + more for low, more in zip(bottom, height, strict=True)]
    axes.set_title("each iteration, seconds")
    axes.set_xlabel("iteration")
    axes.xaxis.set_major_locator(whole_numbers())
    axes.grid(axis="x", visible=False)
    axes.set_ylim(top=1.35 * max(bottom))
    axes.legend(loc="upper center", ncols=4, columnspacing=1.0, handlelength=1.2)


def _windows(rows: Sequence[Row]) -> list[tuple[str, Sequence[Row]]]:
    """The first and the last iterations, never overlapping."""
    size = min(_WINDOW, len(rows) // 2)
    if size == 0:
        return [(_span(rows), rows)] if rows else []
    return [(_span(part), part) for part in (rows[:size], rows[-size:])]


def _span(rows: Sequence[Row]) -> str:
    first, last = rows[0]["iteration"], rows[-1]["iteration"]
    return f"iteration {first}" if first == last else f"iterations {first} to {last}"


def _achieved_by_turn(windows: Sequence[tuple[str, Sequence[Row]]]) -> Panel | None:
    """First unlocks where there are achievements; in dialogues what had been scored by then; else nothing."""
    rows = [row for _, part in windows for row in part]
    if all("episode/unique_achievements" in row for row in rows):
        unlocked = _by_turn(windows, "decision/unique_by_turn")
        told = "; ".join(f"{label}: {sum(values):.2f} an episode" for label, values in unlocked)
        return "achievements unlocked for the first time", f"Unique achievements, {told}", unlocked
    if all("interaction/score_by_turn" in row for row in rows):
        scored = _by_turn(windows, "interaction/score_by_turn")
        told = "; ".join(f"{label}: {values[-1]:.2f} at the last turn" for label, values in scored)
        return "last score up to each turn", f"Last score, {told}", scored
    return None


def _by_turn(windows: Sequence[tuple[str, Sequence[Row]]], name: str) -> Lines:
    return [(label, _mean_by_turn(rows, name)) for label, rows in windows]


def _mean_by_turn(rows: Sequence[Row], name: str) -> list[float]:
    series = [row[name] for row in rows]
    longest = max(map(len, series))
    return [sum(item[t] for item in series if t < len(item)) / len(series) for t in range(longest)]


def _rewards(story: Story, rows: Sequence[Row]) -> list[float]:
    paths = [story.rollouts_file(f"iteration_{row['iteration']}") for row in rows]
    return reward_by_turn([path for path in paths if path is not None], story.job.job.name)


def _turn_lines(axes: Any, lines: Lines, theme: Theme) -> None:
    for (label, values), colour, style in zip(lines, theme.series, ("-", "--"), strict=False):
        axes.step(range(1, len(values) + 1), values, style, where="mid", color=colour, label=label)
    axes.xaxis.set_major_locator(whole_numbers())


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
