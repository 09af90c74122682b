"""Shows the progress of a run: in a terminal, rows of a table above a live line; elsewhere plain lines."""

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_backend.collect.metrics import count_worlds, outcome_interval
from trainer_backend.evaluation.best import describe_others, find_comparable
from trainer_backend.pages.report import last_minus_first
from trainer_backend.pages.story import Row, Story
from trainer_backend.run.row_lines import Pace, columns_for, word_episodes, word_outcome
from trainer_backend.rundir.state import ProcessRole

_ROWS_A_HEAD = 20  # rows between two prints of the titles
_LEAST_WIDTH, _TITLE_WIDTH = 6, 12  # longer titles are wrapped between words
_SILENT_S = 60.0  # without a terminal, the stage is printed after this time without a line


class ConsoleReporter:
    """Prints the progress of a run to a console. `clock` returns seconds.

    This is a `parts.Reporter`, and a context manager that shows the live line.
    """

    def __init__(
        self, console: Console, iterations: int | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._console, self._iterations, self._clock = console, iterations, clock
        self._start_s = self._printed_s = clock()
        self._pace = Pace(clock)  # for the live line; other lines arrive as finished text
        self._titles: list[str] = []
        self._widths: list[int] = []  # of the columns; a column becomes wider if a number needs it
        self._rows_since_head = 0
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

    def note(self, text: str) -> None:
        self.say(text)

    def stage(self, name: str, done: int, total: int) -> None:
        self._stage = (name, done, total)
        if self._live is None and self._clock() - self._printed_s >= _SILENT_S:
            self.say(self._stage_text())

    def metrics(self, row: dict[str, Any], line: str) -> None:
        if row["kind"] == "iteration":
            self._pace.finish(row["iteration"], self._iterations)
        if row["kind"] == "iteration" and self._live is not None:
            self._print_row(row, columns_for(row))
        elif line:
            text = Text(line)
            if row["kind"] == "evaluation":
                text.stylize("bold", 0, line.find(word_episodes(row)))
            self._print(text)

    def process(
        self, name: str, *, role: ProcessRole, state: str, version: int | None = None, word: str = "",
        host: str = "",
    ) -> None:  # fmt: skip
        """Show nothing, since lost processes are also reported by `say`."""

    def _print(self, line: Text) -> None:
        self._printed_s = self._clock()
        # Text instead of a string, because rich would read brackets as markup, drop them or raise.
        self._console.print(
            Text.assemble((self._elapsed_text(), "dim"), " ", line), soft_wrap=self._live is None
        )

    def _print_row(self, row: Row, columns: Sequence[tuple[str, str, str]]) -> None:
        """Print a row above the live line, where it stays in the terminal's history."""
        titles = [title for _, title, _ in columns]
        cells = [form.format(row[key]) for key, _, form in columns]
        fits = all(len(cell) <= width for cell, width in zip(cells, self._widths, strict=False))
        has_head = titles == self._titles and fits and self._rows_since_head < _ROWS_A_HEAD
        if titles != self._titles:
            self._widths = [
                min(_TITLE_WIDTH, max(_LEAST_WIDTH, *map(len, title.split()))) for title in titles
            ]
        self._widths = [max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)]
        self._titles, self._rows_since_head = titles, self._rows_since_head + 1 if has_head else 1
        table = Table(box=None, pad_edge=False, show_header=not has_head)
        for title, width in zip(titles, self._widths, strict=True):
            table.add_column(Text(title), justify="right", width=width)
        table.add_row(*cells)
        self._console.print(table)

    def _render(self) -> Group:
        _, done, total = self._stage
        parts = (self._elapsed_text(), self._pace.count(), self._stage_text(), self._pace.left())
        line = Text("  ".join(filter(None, parts)))
        return Group(line, ProgressBar(total=max(total, 1), completed=done, width=60))

    def _stage_text(self) -> str:
        name, done, total = self._stage
        return f"{name}  {done}/{total}" if name else ""

    def _elapsed_text(self) -> str:
        minutes, seconds = divmod(int(self._clock() - self._start_s), 60)
        return f"{minutes:02d}:{seconds:02d}"


def closing_lines(story: Story) -> list[str]:
    """Summarise a run: the first and the last evaluation, their difference, and the best checkpoint.

    The last evaluation is the result. The best checkpoint comes last, with a note: it was selected by the
    same evaluations that its figure comes from, which biases the figure upwards.
    """
    evaluations, best = story.evaluations, story.best_evaluation
    if not evaluations:
        return []
    first, last = evaluations[0], evaluations[-1]
    lines = [("before RL", f"{word_outcome(first)}, {count_worlds(first)}")]
    if last is not first:
        lines.append((f"after iteration {last['iteration']}", f"{word_outcome(last)}, {count_worlds(last)}"))
        difference = last_minus_first(story)
        begins = find_comparable(evaluations)[0]
        since = "" if begins is first else f", from iteration {begins['iteration']} on"
        if difference is not None:
            text = f"{difference.word('{:+.2f}')}, {difference.count} {story.unit}s{since}"
            lines.append((f"difference, {story.unit} by {story.unit}", text))
    if others := describe_others(evaluations):
        lines.append(("not comparable", others))
    if best is None:
        lines.append(("best checkpoint", f"none: too many {story.unit}s were lost to compare evaluations"))
    elif last is not first:
        best_text = f"iteration {best['iteration']}, {outcome_interval(best).mean:.2f}"
        lines.append(("best checkpoint", f"{best_text} (chosen on these {story.unit}s: not a result)"))
    return [f"{name:>26}: {text}" for name, text in lines]
