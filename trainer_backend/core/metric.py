"""How a metric is declared, next to the code that computes it: its sentence for the docs, and its chart.

`trainer_backend/metrics.py` collects the declarations, for docs/metrics.md and the charts of a run.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

Kind = Literal["iteration", "evaluation", "teacher", "prompts"]
Form = Literal["number", "percent", "seconds"]
Section = Literal[
    "Outcome", "Rewards and credit", "Episodes", "Losses and policy", "Mixture", "Speed", "System", ""
]


@dataclass(frozen=True, slots=True)
class Line:
    """One metric of a panel. Metrics of the same name with `_low` and `_high` are its band."""

    metric: str  # may contain a `*`
    label: str = ""
    """The name in the legend; absent: the text that the `*` matches."""
    kind: Kind = "iteration"
    band: tuple[str, str] | None = None
    """The metrics of the bounds, if they have other names than `_low` and `_high`."""
    needs: str | None = None
    """A metric of an iteration; runs without it do not show this line."""

    @property
    def bounds(self) -> tuple[str, str]:
        return self.band or (f"{self.metric}_low", f"{self.metric}_high")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics of the line and of its band."""
        return (self.metric, *self.bounds)


@dataclass(frozen=True)
class Panel:
    """A chart; all fields except `lines` are also keys of the chart (series.make_chart)."""

    key: str  # in addresses
    section: Section
    title: str
    note: str  # a sentence with the unit
    lines: tuple[Line, ...] = ()
    form: Form = "number"
    stacked: bool = False  # its lines are parts of a whole
    wide: bool = False
    unit: str = "iteration"  # of the horizontal axis
    scatter: bool = False  # points without a line between them


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric of metrics.jsonl."""

    name: str
    """Such as `stop/*`, where `*` matches any text; `app/lost/*` may be one table of numbers, `app/lost`."""
    means: str
    """What it is, with its unit; without a semicolon, which separates the metrics of a row."""
    panel: Panel | str = ""
    """The chart that shows it: the key of a panel of `pages/panels.py`, or a panel of its own, which comes
    last in its section. Absent: a chart without a title."""
    label: str | Mapping[Kind, str] = ""
    """Its name in the legend; a mapping by kind of row, if it is also in rows other than iterations'."""
    band: tuple[str, str] | None = None
    """As in `Line`."""
    needs: str | None = None
    """As in `Line`."""

    def lines(self) -> Iterator[Line]:
        labels: Mapping[Kind, str] = {"iteration": self.label} if isinstance(self.label, str) else self.label
        for kind, label in labels.items():
            yield Line(self.name, label, kind, self.band, self.needs)

    def matches(self, name: str) -> bool:
        """Return whether `name` is this metric, a bound of its interval, or its whole table of numbers."""
        patterns = (self.name, f"{self.name}_low", f"{self.name}_high", self.name.removesuffix("/*"))
        return any(fnmatchcase(name, pattern) for pattern in patterns)


class Row:
    """Metrics that docs/metrics.md explains together, in their order.

    Args:
        when: which runs have them; absent: all.
        note: sentences about all of them.
    """

    def __init__(self, *metrics: Metric, when: str = "", note: str = "") -> None:
        self.metrics, self.when, self.note = metrics, when, note

    def __str__(self) -> str:
        names = ", ".join(f"`{metric.name}`" for metric in self.metrics)
        means = "; ".join(metric.means for metric in self.metrics)
        when = f"{self.when}: " if self.when else ""
        note = f". {self.note}" if self.note else ""
        return f"| {names} | {when}{means}{note} |"
