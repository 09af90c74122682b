"""`turnwise compare` for a terminal."""

from collections.abc import Iterable, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainer_backend.report.compare import doubts, summary_columns, summary_rows
from trainer_backend.report.comparison import Side, setting_differences


def comparison_table(sides: Sequence[Side]) -> Group:
    """The last evaluations, the differences to the first run, and the settings that differ."""
    names = [side.name for side in sides]
    settings = [(key, *values) for key, values in setting_differences(sides)]
    return Group(
        _table(summary_columns(sides), summary_rows(sides)),
        *(Text(f"- {doubt}") for doubt in doubts(sides)),
        "",
        _table(("settings that differ", *names), settings),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Folded where the terminal is narrow, never cut: the ends of two values may be all that differs."""
    table = Table(box=None, pad_edge=False)
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
