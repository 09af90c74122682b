"""From a drawing function to PNGs: one for light pages, one for dark ones."""

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

# Narrow, so that 10 point text is still readable when a phone shows the picture 360 pixels wide.
WIDTH_IN = 5.6
_DPI = 150
# Share of the height between a curve and the frame, so that no line or marker is cut in half.
_AIR_ABOVE, _AIR_BELOW = 0.08, 0.03


@dataclass(frozen=True, slots=True)
class Theme:
    """Colours of a page. `series` tells data apart, after Okabe and Ito: for colour-blind readers too."""

    name: str
    ground: str
    ink: str
    faint: str
    series: tuple[str, ...]


_ON_LIGHT = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
_ON_DARK = ("#56B4E9", "#E69F00", "#3BC49A", "#E6A5CC", "#F0E442")
LIGHT = Theme("light", "#ffffff", "#1f2328", "#d0d7de", _ON_LIGHT)
DARK = Theme("dark", "#161b22", "#e6edf3", "#3d444d", _ON_DARK)


@dataclass(frozen=True, slots=True)
class Picture:
    """A chart as PNGs; `alt` says in words what it shows."""

    name: str
    alt: str
    light: bytes
    dark: bytes


Draw = Callable[[Figure, Theme], None]


def picture(name: str, alt: str, draw: Draw, *, height_in: float) -> Picture:
    """Draw once for each theme."""
    return Picture(name, alt, _png(draw, LIGHT, height_in), _png(draw, DARK, height_in))


def whole_numbers() -> MaxNLocator:
    """Ticks for an axis that counts something."""
    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def plain(text: str) -> str:
    """For matplotlib, which reads what is between two $ as mathematics."""
    return text.replace("$", r"\$")


def from_zero(axes: Any) -> None:
    """Show 0 and all that was drawn on `axes`, with air between that and the frame.

    matplotlib's own margin is a share of how much the data vary: next to nothing for a curve that is flat
    and far from 0.
    """
    low, high = min(0.0, axes.dataLim.y0), max(0.0, axes.dataLim.y1)
    height = high - low or 1.0
    axes.set_ylim(low - _AIR_BELOW * height, high + _AIR_ABOVE * height)


def seconds(value: float) -> str:
    """A duration for a label: a stage that took time is never "0 s"."""
    if 0.0 < value < 0.1:
        return "under 0.1 s"
    return f"{value:.1f} s" if value < 9.95 else f"{value:.0f} s"


def _png(draw: Draw, theme: Theme, height_in: float) -> bytes:
    file = io.BytesIO()
    with matplotlib.rc_context(_settings(theme)):
        figure = Figure(figsize=(WIDTH_IN, height_in), dpi=_DPI, layout="constrained")
        draw(figure, theme)
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()


def _settings(theme: Theme) -> dict[Any, Any]:  # matplotlib types the keys one by one
    return {
        "font.size": 10,
        "axes.titlesize": 10,
        "axes.titlelocation": "left",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "legend.fontsize": 9,
        "lines.linewidth": 1.8,
        "figure.facecolor": theme.ground,
        "axes.facecolor": theme.ground,
        "savefig.facecolor": theme.ground,
        "text.color": theme.ink,
        "axes.labelcolor": theme.ink,
        "axes.edgecolor": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
        "grid.color": theme.faint,
    }
