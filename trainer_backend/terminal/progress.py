"""What a person sees while a run goes on: a live table in a terminal, plain lines elsewhere."""

import re
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from trainer_backend.collect.metrics import outcome_interval, outcome_name
from trainer_backend.core.mixture_history import OUTCOME, metric_of
from trainer_backend.core.policies import ACTOR
from trainer_backend.core.statistics import Interval
from trainer_backend.pages.report import last_minus_first
from trainer_backend.pages.story import Row, Story

_SHOWN_ROWS = 14
_TITLE_WIDTH = 12  # a longer title is broken between its words
_OUTCOME = "episode/outcome_reward"
_REWARDED = "decision/nonzero_frac"
_OF_A_POLICY = re.compile(metric_of(r"[^/]+", OUTCOME))
# Shown where a row has it.
_COLUMNS = (
    ("iteration", "iteration", "{:.0f}"),
    (_OUTCOME, "outcome", "{:.2f}"),
    ("reward/mean", "reward", "{:.2f}"),
    (_REWARDED, "rewarded", "{:.1%}"),
    ("interaction/answers", "answers", "{:.1f}"),
    ("statelm/segments", "segments", "{:.1f}"),
    ("statelm/peak_context", "context", "{:.0f}"),
    ("statelm/context_length_exceeded", "ran over", "{:.1%}"),
    ("loss/entropy", "entropy", "{:.2f}"),
    ("loss/approx_kl", "kl", "{:.4f}"),
    ("rollout/policy_choice", "by the actor", "{:.0%}"),
    ("mixture/counted_share", "fixed counted", "{:.1%}"),
)
# Behind them, and behind what fixed policies earned.
_TIMES = (("time/collect_s", "collect s", "{:.1f}"), ("time/update_s", "update s", "{:.1f}"))


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
            self.say("  ".join(f"{title} {_cell(row, key, form)}" for key, title, form in _columns([row])))

    def _print(self, line: Text) -> None:
        # Text, never a string: rich would read what stands in brackets as markup, drop it, or raise on it.
        self._console.print(Text.assemble((self._elapsed(), "dim"), " ", line), soft_wrap=self._live is None)

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False)
        shown = self._rows[-_SHOWN_ROWS:]
        columns = _columns(shown)
        for _, title, _ in columns:
            table.add_column(Text(title), justify="right", max_width=_TITLE_WIDTH)
        for row in shown:
            table.add_row(*(_cell(row, key, form) for key, _, form in columns))
        name, done, total = self._stage
        line = Text(f"{self._elapsed()}  {name}  {done}/{total}")
        return Group(table, line, ProgressBar(total=max(total, 1), completed=done, width=60))

    def _elapsed(self) -> str:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        return f"{minutes:02d}:{seconds:02d}"


def evaluation_line(row: Row) -> Text:
    """An evaluation in a sentence, the best-known achievements first."""
    rates = sorted(row.get("eval/success_rates", {}).items(), key=lambda item: -item[1])
    told = ", ".join(f"{name} {rate:.0%}" for name, rate in rates if rate > 0)
    result = f"held-out after iteration {row['iteration']}: {_outcome(row)}"
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
    named = [("before RL", _outcome(first))]
    if last is not first:
        named.append((f"after iteration {last['iteration']}", _outcome(last)))
        found = last_minus_first(story)
        if found is not None:
            named.append(
                (
                    f"difference, {story.unit} by {story.unit}",
                    f"{_interval(found)}, {found.count} {story.unit}s",
                )
            )
        chosen = f"iteration {best['iteration']}, {outcome_interval(best).mean:.2f}"
        named.append(("best checkpoint", f"{chosen} (chosen on these {story.unit}s: not a result)"))
    return [f"{name:>26}: {told}" for name, told in named]


def _outcome(row: Row) -> str:
    found = outcome_interval(row)
    bounds = f" (95 % {found.low:.2f} to {found.high:.2f})" if found.low is not None else ""
    return f"{found.mean:.2f}{bounds} {outcome_name(row)}"


def _interval(found: Interval) -> str:
    bounds = f" (95 % {found.low:+.2f} to {found.high:+.2f})" if found.low is not None else ""
    return f"{found.mean:+.2f}{bounds}"


def _columns(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """Key, title and form of each figure that the rows have."""
    if not rows:
        return []
    named = [
        (key, outcome_name(rows[-1]) if key == _OUTCOME else title, form)
        for key, title, form in (*_COLUMNS, *_of_fixed_policies(rows), *_TIMES)
    ]
    achieved = any("episode/unique_achievements" in row for row in rows)
    return [
        item for item in named
        if any(item[0] in row for row in rows) and (achieved or item[0] != _REWARDED)
    ]  # fmt: skip


def _of_fixed_policies(rows: Sequence[Row]) -> list[tuple[str, str, str]]:
    """The outcome of each, under its name; the actor's has a column anyway."""
    keys = dict.fromkeys(key for row in rows for key in row if _OF_A_POLICY.fullmatch(key))
    return [(key, key.split("/")[1], "{:.2f}") for key in keys if key != metric_of(ACTOR, OUTCOME)]


def _cell(row: Row, key: str, form: str) -> str:
    return form.format(row[key]) if key in row else "-"
