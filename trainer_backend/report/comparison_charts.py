"""Charts that lay runs over one another: held-out and training curves, entropy, success rates."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from trainer_backend.core.statistics import Interval
from trainer_backend.evaluation.outcome import outcome_interval
from trainer_backend.report.charts import Picture, Theme, from_zero, picture, plain, whole_numbers
from trainer_backend.report.comparison import Side, outcome_of
from trainer_backend.report.learning_charts import spaced
from trainer_backend.report.marks import band, rate_points

Points = Sequence[tuple[int, Interval]]

_LINES = ("-", "--", ":", "-.")
_MARKERS = "osD^vPX"
_MOST_MARKED = 25  # points of a line: more of them would hide it behind its markers
_LEGEND_LINE_IN = 0.22


@dataclass(frozen=True, slots=True)
class _Look:
    """How a run is drawn, the same in every chart; colour, line and marker come round at different times."""

    colour: str
    line: str
    marker: str
    label: str


def held_out_curves(sides: Sequence[Side]) -> Picture | None:
    """The evaluations of every run with their 95 % bands."""
    return _curves(
        sides,
        "held_out",
        f"{outcome_of(sides)} an episode, held-out",
        lambda side: [(row["iteration"], outcome_interval(row)) for row in side.story.evaluations],
    )


def training_curves(sides: Sequence[Side]) -> Picture | None:
    """The training episodes of every run; those of iteration k at k - 1, the updates behind their policy."""
    return _curves(
        sides,
        "training",
        f"{outcome_of(sides)} an episode, training",
        lambda side: _metric(side, "episode/outcome_reward", -1),
    )


def entropies(sides: Sequence[Side]) -> Picture | None:
    """The entropy of the policy in every run."""
    return _curves(sides, "entropy", "entropy, nats a token", lambda side: _metric(side, "loss/entropy", 0))


def success_rates_side_by_side(sides: Sequence[Side]) -> Picture | None:
    """Rate of each achievement in the last evaluation of every run; None where no run has one."""
    names = achievements(sides)
    shown = [(index, side, side.last) for index, side in enumerate(sides) if side.last is not None]
    if not names:
        return None

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for place, (index, side, row) in enumerate(shown):
            look = _look(theme, index, side.name)
            offset = (place - (len(shown) - 1) / 2) * -0.72 / len(shown)
            rate_points(
                axes, names, row, offset=offset, label=look.label, colour=look.colour, marker=look.marker
            )
        axes.set_yticks(range(len(names)), [spaced(name) for name in names])
        axes.set_ylim(-0.7, len(names) - 0.3)
        axes.set_xlim(-0.02, 1.02)
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("episodes that unlocked it (bars: 95 %)")
        figure.legend(loc="outside upper left", ncols=1)

    runs = ", ".join(side.name for _, side, _ in shown)
    alt = f"Success rates of {len(names)} achievements in the last evaluation of {runs}; the table has them."
    height = 0.9 + len(names) * max(0.27, 0.11 * len(shown)) + _LEGEND_LINE_IN * len(shown)
    return picture("success_rates", alt, draw, height_in=height)


def achievements(sides: Sequence[Side]) -> list[str]:
    """All names in the last evaluations, the rarest of the first run that has one first."""
    rates = [side.last.get("eval/success_rates", {}) for side in sides if side.last is not None]
    names = {name for row in rates for name in row}
    return sorted(names, key=lambda name: (*(row.get(name, 0.0) for row in rates), name))


def _curves(
    sides: Sequence[Side], name: str, title: str, points_of: Callable[[Side], Points]
) -> Picture | None:
    found = [points_of(side) for side in sides]
    if not any(found):
        return None

    marked = max(map(len, found)) < _MOST_MARKED

    def draw(figure: Figure, theme: Theme) -> None:
        axes = figure.subplots()
        for index, (side, points) in enumerate(zip(sides, found, strict=True)):
            look = _look(theme, index, side.name)
            marker = look.marker if marked else ""
            band(axes, points, colour=look.colour, label=look.label, line=look.line, marker=marker)
        axes.set_xlabel("iterations finished")
        axes.set_title(plain(title))
        from_zero(axes)
        axes.xaxis.set_major_locator(whole_numbers())
        figure.legend(loc="outside upper left", ncols=1)

    told = "; ".join(
        f"{side.name}: {points[0][1].mean:.2f} to {points[-1][1].mean:.2f}"
        for side, points in zip(sides, found, strict=True)
        if points
    )
    height = 3.2 + _LEGEND_LINE_IN * len(sides)
    return picture(name, f"Line chart of {title}, over iterations. {told}.", draw, height_in=height)


def _metric(side: Side, name: str, shift: int) -> Points:
    rows = side.story.iterations
    return [(row["iteration"] + shift, Interval(row[name], None, None, 1)) for row in rows if name in row]


def _look(theme: Theme, index: int, name: str) -> _Look:
    label = plain(name)
    return _Look(
        theme.series[index % len(theme.series)],
        _LINES[index % len(_LINES)],
        _MARKERS[index % len(_MARKERS)],
        f" {label}" if label.startswith("_") else label,  # matplotlib would leave it out
    )
