"""`turnwise recredit` for a terminal: what estimators gave, and how they agree.

"Same sign" is the share of decisions where two agree, among those where neither is 0.
"""

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from trainer_backend.core.agreement import correlation, sign_agreement, spread_of
from trainer_backend.recredit.estimators import Recredited

Agreement = Callable[[Sequence[float], Sequence[float]], float | None]


def recredit_tables(found: Recredited, cosines: Mapping[tuple[str, str], float] | None = None) -> Group:
    """Tables of spread, correlation, sign agreement and, where there are some, cosines of gradients."""
    advantages = {name: found.advantages(name) for name in found.credits}
    parts: list[Table | Text | str] = []
    if advantages:
        decisions = len(next(iter(advantages.values())))
        parts += [Text(f"{len(found.rollouts)} episodes, {decisions} decisions"), _spreads(advantages), ""]
        parts += [_pairs("correlation", advantages, correlation), ""]
        parts += [_pairs("same sign", advantages, sign_agreement)]
    if cosines:
        parts += ["", _table("cosine of gradients", list(advantages), lambda a, b: cosines.get((a, b)))]
    parts += [Text(f"{name}: {reason}", style="yellow") for name, reason in found.refused.items()]
    return Group(*parts)


def _spreads(advantages: Mapping[str, Sequence[float]]) -> Table:
    table = Table(box=None, pad_edge=False)
    for column in ("advantages", "mean", "variance", "share of 0"):
        table.add_column(column, justify="left" if column == "advantages" else "right")
    for name, values in advantages.items():
        spread = spread_of(values)
        table.add_row(name, f"{spread.mean:+.4f}", f"{spread.std**2:.4f}", f"{spread.zero_frac:.0%}")
    return table


def _pairs(title: str, advantages: Mapping[str, Sequence[float]], of: Agreement) -> Table:
    return _table(title, list(advantages), lambda a, b: of(advantages[a], advantages[b]))


def _table(title: str, names: Sequence[str], of: Callable[[str, str], float | None]) -> Table:
    """Every pair once: below the diagonal."""
    table = Table(box=None, pad_edge=False)
    table.add_column(title)
    for name in names[:-1]:
        table.add_column(name, justify="right")
    for row, name in enumerate(names):
        if row:
            table.add_row(name, *(_number(of(name, other)) for other in names[:row]))
    return table


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:+.3f}"
