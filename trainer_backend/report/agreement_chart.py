"""Estimators against one another, a point a decision."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from trainer_backend.report.charts import Theme, picture

_POINTS = 4_000
_COLUMNS = 3


def agreement_png(advantages: Mapping[str, Sequence[float]]) -> bytes:
    """Each estimator against the first, decision by decision."""
    first, *others = advantages
    baseline = advantages[first]
    # Evenly spread over the batch: a picture of every decision would be a blot.
    step = max(1, len(baseline) // _POINTS)

    rows = -(-len(others) // _COLUMNS)

    def draw(figure: Figure, theme: Theme) -> None:
        panels = list(figure.subplots(rows, min(_COLUMNS, len(others)), squeeze=False).flat)
        for name, panel in zip(others, panels, strict=False):
            panel.plot(baseline[::step], advantages[name][::step], ".", markersize=2, color=theme.series[0])
            panel.axhline(0, color=theme.faint, linewidth=0.8)
            panel.axvline(0, color=theme.faint, linewidth=0.8)
            panel.set_xlabel(first)
            panel.set_title(name)
        for spare in panels[len(others) :]:
            spare.set_axis_off()

    alt = f"advantages of {', '.join(others)} against those of {first}, a point a decision"
    return picture("agreement", alt, draw, height_in=2.2 * rows).light
