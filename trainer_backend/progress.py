"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

_SHOWN_ROWS = 14
_COLUMNS = (
    ("iteration", "iteration", "{:.0f}"),
    ("episode/unique_achievements", "unique ach.", "{:.2f}"),
    ("reward/mean", "reward", "{:.2f}"),
    ("decision/nonzero_frac", "rewarded", "{:.1%}"),
    ("loss/entropy", "entropy", "{:.2f}"),
    ("loss/approx_kl", "kl", "{:.4f}"),
    ("time/collect_s", "collect s", "{:.1f}"),
    ("time/update_s", "update s", "{:.1f}"),
)


class ConsoleReporter:
    """Use as a context manager; implements `protocols.Reporter`."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._rows: list[dict[str, Any]] = []
        self._stage = ("", 0, 1)
        self._live = (
            Live(get_renderable=self._render, console=console, refresh_per_second=4, transient=False)
            if console.is_terminal
            else None
        )

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        self._console.print(f"[dim]{self._elapsed()}[/dim] {text}", highlight=False)

    def stage(self, name: str, done: int, total: int) -> None:
        self._stage = (name, done, total)

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "evaluation":
            self.say(evaluation_line(row))
            return
        if row["kind"] != "iteration":
            return
        self._rows.append(row)
        if self._live is None:
            self.say("  ".join(f"{title} {_cell(row, key, form)}" for key, title, form in _COLUMNS))

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        for _, title, _ in _COLUMNS:
            table.add_column(title, justify="right")
        for row in self._rows[-_SHOWN_ROWS:]:
            table.add_row(*(_cell(row, key, form) for key, _, form in _COLUMNS))
        name, done, total = self._stage
        line = Text(f"{self._elapsed()}  {name}  {done}/{total}")
        return Group(table, line, ProgressBar(total=max(total, 1), completed=done, width=60))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:02d}:{seconds:02d}"


def evaluation_line(row: dict[str, Any]) -> str:
    """An evaluation in a sentence, the best-known achievements first."""
    rates = sorted(row["eval/success_rates"].items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate > 0)
    return (
        f"[bold]held-out worlds after iteration {row['iteration']}: "
        f"{_unique(row)} unique achievements[/bold], {row['eval/episodes']} episodes: {told}"
    )


def closing_lines(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Before and after, in two lines: the first and the best evaluation of a run."""
    evaluations = [row for row in rows if row["kind"] == "evaluation"]
    if not evaluations:
        return []
    best = max(evaluations, key=lambda row: float(row["eval/outcome_reward"]))
    named = [("before RL", evaluations[0]), (f"best, after iteration {best['iteration']}", best)]
    return [f"{name:>26}: {_unique(row)} unique achievements" for name, row in named]


def _unique(row: dict[str, Any]) -> str:
    low, high = row["eval/unique_achievements_low"], row["eval/unique_achievements_high"]
    interval = f" (95 % {low:.2f} to {high:.2f})" if low is not None else ""
    return f"{row['eval/unique_achievements']:.2f}{interval}"


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    return form.format(row[key]) if key in row else "-"
