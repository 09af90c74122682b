"""Tables with the figures of `turnwise eval` and `turnwise compare`, for a terminal."""

from collections.abc import Iterable, Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer_backend.core.statistics import Interval
from trainer_backend.evaluation.result import EvaluationResult
from trainer_backend.pages.compare import doubts, setting_differences, summary_columns, summary_rows
from trainer_backend.pages.story import Story

_ROWS = 10


def tables(result: EvaluationResult) -> Group:
    """Return the tables of an evaluation. The table with the result comes last, where it stays visible."""
    details: list[RenderableType] = []
    if result.unique:
        rates = sorted(result.rates.items(), key=lambda item: (-item[1].mean, item[0]))
        rows = ((name, f"{rate.mean:.1%}", _bounds(rate, "{:.1%}")) for name, rate in rates)
        details = [_table(("achievement", "episodes", "95 %"), rows), "", _turns(result), ""]
    setting = {"policy": result.policy}
    setting |= {"model, as its server says": ", ".join(result.models)} if result.models else {}
    setting |= {name: str(value) for name, value in result.setting.items()}
    figures = _table(("", ""), _figures(result))
    return Group(_table(("", ""), setting.items()), "", *details, *_worst_rows(result), figures)


def _figures(result: EvaluationResult) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of each figure; the figures that papers compare come first."""
    yield from _result(result)
    lost = f", {result.lost} more lost: in no figure" if result.lost else ""
    each = f" of {result.outcome.count} worlds, {result.repeats} each" if result.repeats > 1 else ""
    yield "episodes", f"{result.episodes}{each}{lost}"
    if result.lost:
        yield "lost", result.lost_because
    yield "decisions", result.decisions.word("{:.1f}")
    yield "env steps", result.env_steps.word("{:.1f}")
    yield "invalid decisions", f"{result.invalid_frac:.2%}"
    for name, value in result.conversation.items():  # a list has values by turn
        yield name, " ".join(f"{item:.2f}" for item in ([value] if isinstance(value, float | int) else value))
    if result.prompt_tokens is not None:
        yield "tokens", f"{result.prompt_tokens:,} of prompts, {result.sampled_tokens or 0:,} sampled"
    yield "ended by", _counts(sorted(result.endings.items()))
    yield "failures", _counts(result.failures.items())


def _result(result: EvaluationResult) -> Iterator[tuple[str, str]]:
    if result.crafter_score is not None:
        yield "Crafter score", result.crafter_score.word("{:.1f} %")
    yield "environment's reward", result.env_reward.word("{:.2f}")
    if result.progress is not None:
        yield "progress", f"{result.progress.word('{:.1f} %')} of {len(result.rates)} achievements"
    name, _, meaning = result.outcome_definition.partition(": ")
    yield name, result.outcome.word("{:.2f}") + (f": {meaning}" if meaning else "")
    if result.solved_in_any is not None:
        yield f"solved in any of {result.repeats}", result.solved_in_any.word("{:.1%}")
    if result.unique is not None and result.unique != result.outcome:
        yield "unique achievements", result.unique.word("{:.2f}")


def _turns(result: EvaluationResult) -> Table:
    rows = [
        (
            str(span.first) if span.first == span.last else f"{span.first} to {span.last}",
            str(span.playing),
            f"{span.unique.mean:.2f}",
            _bounds(span.unique, "{:.2f}"),
            f"{span.ach.mean:.2f}",
            _bounds(span.ach, "{:.2f}"),
            f"{span.rewarded:.1%}",
        )
        for span in result.spans
    ]
    return _table(("decisions", "playing", "unlocks", "95 %", "rises", "95 %", "rewarded"), rows)


def _worst_rows(result: EvaluationResult) -> list[RenderableType]:
    """Return a table of the data set's rows with the lowest outcomes. The JSON output contains all rows."""
    if not result.rows:
        return []
    worst = sorted(result.rows.items(), key=lambda item: item[1])[:_ROWS]
    rows = ((row_id, result.row_places.get(row_id, ""), f"{outcome:.2f}") for row_id, outcome in worst)
    table = _table(("held-out row", "where", "outcome"), rows)
    return [f"lowest outcomes of {len(result.rows)} rows", table, ""]


def _counts(items: Iterable[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {count}" for name, count in items) or "none"


def _bounds(interval: Interval, form: str) -> str:
    """Format an interval as `6.88 to 7.96`; return an empty string if it has no bounds."""
    if interval.low is None or interval.high is None:
        return ""
    return f"{form.format(interval.low)} to {form.format(interval.high)}"


def comparison_table(sides: Sequence[Story]) -> Group:
    """Return tables of each run's last evaluation, differences to the first run, and settings that differ."""
    names = [side.name for side in sides]
    settings = [(key, *values) for key, values in setting_differences(sides)]
    return Group(
        _table(summary_columns(sides), summary_rows(sides)),
        *(Text(f"- {doubt}") for doubt in doubts(sides)),
        "",
        _table(("settings that differ", *names), settings),
    )


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Make a table. In a narrow terminal its cells are wrapped, because cut cells might look equal.

    Cells are Text, because rich reads brackets in strings as markup. If all column names are empty, the table
    has no header.
    """
    table = Table(box=None, pad_edge=False, show_header=any(columns))
    for column in columns:
        table.add_column(Text(column), overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table
