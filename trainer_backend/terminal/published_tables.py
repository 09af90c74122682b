"""Published rows beside an evaluation, for a terminal: first the reasons why they are not comparable."""

from collections.abc import Iterator

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from trainer_backend.evaluation.beside_published import Group
from trainer_backend.evaluation.published_crafter import Figure
from trainer_backend.evaluation.result import EvaluationResult

_COLUMNS = (("score", "score %"), ("reward", "reward"), ("progress", "progress %"))


def published(result: EvaluationResult) -> Iterator[RenderableType]:
    """Yield a table per group of rows with the same protocol, then the addresses of their sources."""
    sources = list(dict.fromkeys((row.source, row.url) for group in result.published for row in group.rows))
    for group in result.published:
        yield Text(f"published: {group.title}", style="bold")
        for difference in group.differences:
            yield Text(f"- {difference}")
        yield _rows(result, group, sources)
        yield ""
    for number, (title, url) in enumerate(sources, start=1):
        yield Text(f"[{number}] {title}" + (f": {url}" if url else ""))
    if sources:
        yield ""


def _rows(result: EvaluationResult, group: Group, sources: list[tuple[str, str]]) -> Table:
    columns = [(name, title) for name, title in _COLUMNS if any(getattr(row, name) for row in group.rows)]
    table = Table("agent", *(title for _, title in columns), "learned from", "", box=None, pad_edge=False)
    ours = _ours(result)
    name = "this evaluation" if group.comparable else "this, NOT comparable"
    table.add_row(Text(name, style="bold"), *(_mean(ours[column]) for column, _ in columns), "", "")
    for row in group.rows:
        cells = [_figure(getattr(row, column)) for column, _ in columns]
        mark = f"[{sources.index((row.source, row.url)) + 1}]"
        table.add_row(Text(row.agent), *cells, row.learned_from, Text(mark))
    return table


def _ours(result: EvaluationResult) -> dict[str, float | None]:
    return {
        "score": result.crafter_score.mean if result.crafter_score else None,
        "reward": result.env_reward.mean,
        "progress": result.progress.mean if result.progress else None,
    }


def _figure(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    return str(figure.value) if figure.spread is None else f"{figure.value} ± {figure.spread}"


def _mean(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
