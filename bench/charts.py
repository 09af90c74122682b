"""From a drawing function to a PNG, with matplotlib; colours that colour-blind readers tell apart."""

import io
from collections.abc import Callable
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00")  # after Okabe and Ito
_INK, _FAINT = "#1f2328", "#d0d7de"
_SETTINGS: dict[Any, Any] = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.linewidth": 1.8,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "grid.color": _FAINT,
}


def whole_numbers() -> MaxNLocator:
    """Ticks for an axis of counts."""
    return MaxNLocator(integer=True, steps=[1, 2, 5, 10])


def png(draw: Callable[[Figure], None], *, height_in: float) -> bytes:
    """The PNG that `draw` makes of an empty figure."""
    file = io.BytesIO()
    with matplotlib.rc_context(_SETTINGS):
        figure = Figure(figsize=(5.6, height_in), dpi=150, layout="constrained")
        draw(figure)
        figure.savefig(file, format="png", metadata={"Software": None})
    return file.getvalue()
