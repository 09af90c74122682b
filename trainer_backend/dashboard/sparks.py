"""Pure: small curves beside a number, as points of an SVG that is WIDTH by HEIGHT."""

from dataclasses import dataclass

from trainer_backend.dashboard.figures import number
from trainer_backend.dashboard.panels import Form
from trainer_backend.store.rows import Series

WIDTH, HEIGHT = 100.0, 24.0


@dataclass(frozen=True, slots=True)
class Spark:
    """The points, and the same in words; both empty where there is no curve."""

    points: str
    told: str


def spark_of(
    series: Series | None, what: str, form: Form = "number", *, between: tuple[float, float] | None = None
) -> Spark:
    """A curve of two points at least.

    Args:
        what: it is a curve of, for its words.
        between: values of its bottom and its top; absent: its own least and greatest.
    """
    if series is None or len(series.values_N) < 2:
        return Spark("", "")
    values = series.values_N
    low, high = between or (min(values), max(values))
    reach, step = high - low or 1.0, WIDTH / (len(values) - 1)
    points = " ".join(
        f"{at * step:.1f},{HEIGHT - 1 - (value - low) / reach * (HEIGHT - 2):.1f}"
        for at, value in enumerate(values)
    )
    return Spark(points, f"{what} from {number(values[0], form)} to {number(values[-1], form)}")
