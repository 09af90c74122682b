"""Classes that declare a metric: its name, its sentence in docs/metrics.md, and the chart that shows it.

A metric is declared in the file that computes it. `trainer_backend/metrics.py` collects all declarations.
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
    """A line of a chart: one metric, and the band between the metrics that bound it."""

    metric: str  # may contain a `*`
    label: str = ""
    """The name of the line in the legend; if empty, the text that the `*` in `metric` matches."""
    kind: Kind = "iteration"
    band: tuple[str, str] | None = None
    """The names of the metrics that bound the band; absent: `metric` followed by `_low` and `_high`."""
    needs: str | None = None
    """The name of another metric of an iteration. Runs without that metric do not show this line."""

    @property
    def bounds(self) -> tuple[str, str]:
        return self.band or (f"{self.metric}_low", f"{self.metric}_high")

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the line's metric and of the two metrics that bound its band."""
        return (self.metric, *self.bounds)


@dataclass(frozen=True)
class Panel:
    """A chart; all fields except `lines` become keys of the JSON chart (`series.make_chart`)."""

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
    """A metric, or a family of metrics, in metrics.jsonl."""

    name: str
    """Key in metrics.jsonl. A `*` matches any text. A name that ends in `/*`, such as `app/lost/*`, also
    matches the key `app/lost`, whose value is a table of numbers."""
    means: str
    """What the metric measures, with its unit; no semicolon, because a `Row` joins metrics by semicolons."""
    panel: Panel | str = ""
    """The chart that shows the metric: the key of a panel in `pages/panels.py`, or a new panel, which is put
    last in its section. If empty, the metric gets a chart without a title."""
    label: str | Mapping[Kind, str] = ""
    """Name in the legend of charts of iterations. For lines of several kinds: kind -> name in the legend."""
    band: tuple[str, str] | None = None
    """As in `Line`."""
    needs: str | None = None
    """As in `Line`."""

    def lines(self) -> Iterator[Line]:
        labels: Mapping[Kind, str] = {"iteration": self.label} if isinstance(self.label, str) else self.label
        for kind, label in labels.items():
            yield Line(self.name, label, kind, self.band, self.needs)

    def matches(self, name: str) -> bool:
        """Return whether the value of the key `name` is this metric, a bound of its band or its table."""
        patterns = (self.name, f"{self.name}_low", f"{self.name}_high", self.name.removesuffix("/*"))
        return any(fnmatchcase(name, pattern) for pattern in patterns)


class Row:
    """Metrics that share a row of the table in docs/metrics.md.

    Args:
        metrics: the metrics, in the order of the row.
        when: the runs or records that contain the metrics; if empty, all.
        note: sentences about all metrics of the row.
    """

    def __init__(self, *metrics: Metric, when: str = "", note: str = "") -> None:
        self.metrics, self.when, self.note = metrics, when, note

    def __str__(self) -> str:
        names = ", ".join(f"`{metric.name}`" for metric in self.metrics)
        means = "; ".join(metric.means for metric in self.metrics)
        when = f"{self.when}: " if self.when else ""
        note = f". {self.note}" if self.note else ""
        return f"| {names} | {when}{means}{note} |"
