"""Checks ground truths before a run starts, and refuses rows whose ground truth no answer can equal."""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby
from pathlib import Path

from pydantic import JsonValue

from shared_schemas.base import shown
from shared_schemas.documents import normalise
from shared_schemas.numbers import read_number
from trainer_backend.data.rows import TRUTH_COLUMNS, Row
from trainer_backend.errors import DataError
from trainer_backend.job.code_files import interactions_in
from trainer_backend.job.rollout_table import DataTable

GSM8K = "gsm8k"
_GSM8K_MODULES = ("task_app.interactions.gsm8k", "turnwise", "verl.interactions.gsm8k_interaction")
_GSM8K_CLASSES = frozenset(f"{module}.Gsm8kInteraction" for module in _GSM8K_MODULES)
_HINT = (
    f"It is read from {', '.join(TRUTH_COLUMNS)}, interaction_kwargs.ground_truth or answer: rows for verl "
    "have reward_model, those for SkyRL reward_spec."
)
# An error lists at most this many rows by file and line, followed by the number of the others.
_MOST_PLACES = 10


def number_interactions(file: Path | None) -> frozenset[str | None]:
    """Return the names of the interactions in `file` that are known to need a number as ground truth.

    Only interactions of the GSM8K classes are known; the task app reports others later (`collect/trial.py`).
    The result contains None if a row that names no interaction needs a number too. `file` is
    `multi_turn.interaction_config_path`.
    """
    if file is None:
        return frozenset({GSM8K})
    interactions = interactions_in(file)
    names = {name for class_name, name in interactions if class_name in _GSM8K_CLASSES}
    return frozenset({*names, None} if names and len(names) == len(interactions) else names)


def refuse_unmatchable(table: DataTable, rows: Iterable[Row], numbers: Collection[str | None]) -> None:
    """Raise DataError if no answer can equal the ground truth of some rows; list their files and lines.

    Rows with an interaction in `numbers` (see `number_interactions`) need one number. In rows with a
    document, each accepted answer needs a word or a number.
    """
    needs = ((row, _unmet_need(row, table, numbers)) for row in rows)
    unmet = [(row, need) for row, need in needs if need is not None]
    if not unmet:
        return
    first, need = unmet[0]
    bad = [row for row, other in unmet if other == need]
    truth = _truth(first)
    rows_have, place = ("the row has", "") if len(bad) == 1 else (f"{len(bad)} rows have", "in the first ")
    truth_is = "it is missing" if truth is None else f"it is {shown(truth)}"
    raise DataError(
        f"{rows_have} no ground truth that an answer can equal: {place}{truth_is}, and {need}",
        where=_sentence([row.where for row in bad]),
        hint=_HINT,
    )


def note_missing(table: DataTable, split: str, rows: Sequence[Row], *, has_reward: bool) -> list[str]:
    """Return a warning if some rows of a split have a ground truth and others have none.

    Raises DataError instead if an interaction or a reward function would read the missing ground truths.

    Args:
        split: the split's name.
        has_reward: whether the job has a reward function.
    """
    missing = [row for row in rows if row.ground_truth is None]
    if not missing or len(missing) == len(rows):
        return []
    places = _sentence([row.where for row in missing])
    text = f"{len(missing)} of {len(rows)} rows have no ground truth, and the others have one"
    if has_reward or any(_has_interaction(row, table) for row in missing):
        raise DataError(text, where=places, hint=_HINT)
    return [f"warning: {split}: {text} ({places})"]


def _sentence(places: Sequence[str]) -> str:
    """Join files and lines to one text, such as `a.jsonl: lines 3, 7; b.parquet: row 1 and 12 more`."""
    shown_places = [place.rpartition(": ") for place in places[:_MOST_PLACES]]
    texts = []
    for file, group in groupby(shown_places, key=lambda place: place[0]):
        (kind, _, first), *others = (number.partition(" ") for _, _, number in group)
        texts.append(f"{file}: {kind}{'s' * bool(others)} {', '.join([first, *(n for _, _, n in others)])}")
    more = len(places) - len(shown_places)
    return "; ".join(texts) + f" and {more} more" * bool(more)


def _unmet_need(row: Row, table: DataTable, numbers: Collection[str | None]) -> str | None:
    """Return why no answer can equal the row's ground truth, as a clause; None if an answer can."""
    answers = row.ground_truth if isinstance(row.ground_truth, list) else [row.ground_truth]
    has_answers = bool(answers) and all(isinstance(answer, str) and normalise(answer) for answer in answers)
    if row.document is not None and not has_answers:
        return "every accepted answer about a document needs a word or a number"
    name = (row.interaction and row.interaction.name) or table.interaction
    if _has_interaction(row, table) and name in numbers and read_number(_truth(row)) is None:
        interaction = "the interaction" if name is None else f"the interaction {name!r}"
        return f"{interaction} needs one number, such as 42, -1,000 or 3/4"
    return None


def _has_interaction(row: Row, table: DataTable) -> bool:
    return row.interaction is not None or table.interaction is not None


def _truth(row: Row) -> JsonValue:
    """Return the ground truth that the interaction starts with: from its own arguments, or else the row's."""
    kwargs = {} if row.interaction is None else row.interaction.kwargs
    return kwargs.get("ground_truth", row.ground_truth)
