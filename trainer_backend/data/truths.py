"""Rows that their interaction could only score as wrong are refused where the data is read."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import JsonValue

from shared_schemas.base import shown
from shared_schemas.numbers import read_number
from trainer_backend.data.rows import TRUTH_COLUMNS, Row
from trainer_backend.errors import DataError
from trainer_backend.job.code_files import classes_in
from trainer_backend.job.rollout_table import DataTable

GSM8K = "gsm8k"
_GSM8K_MODULES = frozenset({"task_app.interactions.gsm8k", "turnwise", "verl.interactions.gsm8k_interaction"})
# Places in an error; the number of the others follows.
_MOST_PLACES = 10


def number_interactions(file: Path | None) -> frozenset[str | None]:
    """The interactions that are known to need a number as ground truth before a task app runs.

    The name None stands for rows that leave the choice to the task app. Which other classes need a number,
    and under which names, a task app says later (`collect/trial.py`).

    Args:
        file: multi_turn.interaction_config_path.
    """
    if file is None:
        return frozenset({GSM8K})
    classes = classes_in(file)
    modules = {module for module, name in classes if name.removesuffix("Interaction").lower() == GSM8K}
    if not modules or not modules <= _GSM8K_MODULES:
        return frozenset()
    return frozenset({GSM8K, None} if len(classes) == 1 else {GSM8K})


def refuse_unmatchable(table: DataTable, rows: Iterable[Row], numbers: Collection[str | None]) -> None:
    """Refuse rows whose ground truth no answer can equal, because their interaction needs a number.

    Args:
        rows: of `table`.
        numbers: the names of the interactions that need a number; None is that of rows that name none.

    Raises:
        DataError: with the places of the rows.
    """
    bad = [row for row in rows if _is_unmatchable(row, table, numbers)]
    if not bad:
        return
    truth, name = _truth(bad[0]), _interaction_name(bad[0], table)
    interaction = "the interaction" if name is None else f"the interaction {name!r}"
    seen = "is missing" if truth is None else f"is {shown(truth)}"
    raise DataError(
        f"no answer can equal the ground truth, which {seen} in the first of {len(bad)}; {interaction} "
        "needs one number, such as 42, -1,000 or 3/4",
        where=_sentence([row.where for row in bad]),
        hint=f"It is read from {', '.join(TRUTH_COLUMNS)}, interaction_kwargs.ground_truth or answer: rows "
        "for verl have reward_model, those for SkyRL reward_spec.",
    )


def _sentence(places: Sequence[str]) -> str:
    """`a.jsonl: lines 3, 7; b.parquet: row 1 and 12 more`"""
    shown_places = [place.rpartition(": ") for place in places[:_MOST_PLACES]]
    texts = []
    for file, group in groupby(shown_places, key=lambda place: place[0]):
        (kind, _, first), *others = (number.partition(" ") for _, _, number in group)
        texts.append(f"{file}: {kind}{'s' * bool(others)} {', '.join([first, *(n for _, _, n in others)])}")
    more = len(places) - len(shown_places)
    return "; ".join(texts) + f" and {more} more" * bool(more)


def _is_unmatchable(row: Row, table: DataTable, numbers: Collection[str | None]) -> bool:
    if row.interaction is None and table.interaction is None:
        return False
    return _interaction_name(row, table) in numbers and read_number(_truth(row)) is None


def _interaction_name(row: Row, table: DataTable) -> str | None:
    own = None if row.interaction is None else row.interaction.name
    return own or table.interaction


def _truth(row: Row) -> JsonValue:
    """The ground truth as start_interaction gets it: the row's arguments come before other columns."""
    kwargs = {} if row.interaction is None else row.interaction.kwargs
    return kwargs.get("ground_truth", row.ground_truth)
