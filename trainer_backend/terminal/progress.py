"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_backend.core.statistics import Interval
from trainer_backend.report.stored_episodes import last_minus_first
from trainer_backend.report.story import Row, Story

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
        self._print(Text(text))

    def stage(self, name: str, done: int, total: int) -> None:
        self._stage = (name, done, total)

    def metrics(self, row: dict[str, Any]) -> None:
        if row["kind"] == "evaluation":
            self._print(evaluation_line(row))
            return
        if row["kind"] != "iteration":
            return
        self._rows.append(row)
        if self._live is None:
            self.say("  ".join(f"{title} {_cell(row, key, form)}" for key, title, form in _COLUMNS))

    def _print(self, line: Text) -> None:
        # Text, never a string: rich would read what stands in brackets as markup, drop it, or raise on it.
        self._console.print(Text.assemble((self._elapsed(), "dim"), " ", line), soft_wrap=self._live is None)

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


def evaluation_line(row: Row) -> Text:
    """An evaluation in a sentence, the best-known achievements first."""
    rates = sorted(row["eval/success_rates"].items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate > 0)
    result = f"held-out worlds after iteration {row['iteration']}: {_unique(row)} unique achievements"
    return Text.assemble((result, "bold"), f", {row['eval/episodes']} episodes", f": {told}" if told else "")


def closing_lines(story: Story) -> list[str]:
    """What the run came to: the first and the last evaluation, their difference, the best checkpoint.

    The last evaluation is the result. The best one is chosen on the worlds that it is measured on, so its
    figure flatters it; it comes last, and says so.
    """
    evaluations, best = story.evaluations, story.best_evaluation
    if best is None:
        return []
    first, last = evaluations[0], evaluations[-1]
    named = [("before RL", f"{_unique(first)} unique achievements")]
    if last is not first:
        named.append((f"after iteration {last['iteration']}", f"{_unique(last)} unique achievements"))
        found = last_minus_first(story)
        if found is not None:
            named.append(("difference, world by world", f"{_interval(found)}, {found.count} worlds"))
        chosen = f"iteration {best['iteration']}, {best['eval/unique_achievements']:.2f}"
        named.append(("best checkpoint", f"{chosen} (chosen on these worlds: not a result)"))
    return [f"{name:>26}: {told}" for name, told in named]


def _unique(row: Row) -> str:
    low, high = row["eval/unique_achievements_low"], row["eval/unique_achievements_high"]
    interval = f" (95 % {low:.2f} to {high:.2f})" if low is not None else ""
    return f"{row['eval/unique_achievements']:.2f}{interval}"


def _interval(found: Interval) -> str:
    bounds = f" (95 % {found.low:+.2f} to {found.high:+.2f})" if found.low is not None else ""
    return f"{found.mean:+.2f}{bounds}"


def _cell(row: Row, key: str, form: str) -> str:
    return form.format(row[key]) if key in row else "-"
