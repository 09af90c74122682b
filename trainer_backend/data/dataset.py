"""The data set of a job: its rows, checked and split into training and held-out ones.

All rows are in memory: a run plays all of them in shuffled epochs anyway, and a mistake in the last row is
reported before the first is played.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from trainer_backend.core.seeds import derived_seed
from trainer_backend.data.layout import find_files
from trainer_backend.data.records import read_records
from trainer_backend.data.rows import ParsedRow, Row, parse_row
from trainer_backend.data.truths import GSM8K, note_missing, refuse_unmatchable
from trainer_backend.errors import DataError
from trainer_backend.job.rollout_table import DataTable

_SHARES = 2**31 - 1

Side = Literal["training", "held-out"]


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of one split, in the order of their files."""

    name: str
    """A name for messages, such as `train of data/gsm8k`."""
    rows: tuple[Row, ...]
    """Rows with unique ids."""
    keys: tuple[str, ...]
    """The key of each row by which `held_out_share` chooses its side: its own id, or else its task digest,
    so that rows with the same question are on the same side."""
    used: Mapping[str, str]
    """The columns that were read, by part of a row."""
    unread: tuple[str, ...] = ()
    """Columns that nothing reads."""


class RowIdentity(NamedTuple):
    """Identifies a row, to tell whether it changed since the run began."""

    side: Side
    id: str
    content: str
    """`Row.content_digest`"""
    task: str
    """`Row.task_digest`"""
    where: str
    """File and line."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """Training rows, and held-out rows that every evaluation plays."""

    training: tuple[Row, ...]
    """Rows in the order of their files."""
    evaluation: tuple[Row, ...]
    """Held-out rows to play, the same for every job with this data and held_out_seed."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""
    identities: tuple[RowIdentity, ...] = ()
    """Identities of all rows in the order of their files, also of rows that no evaluation plays."""
    by_position: bool = False
    """Whether ids are positions, see `read_split`; false where all rows have ids of their own."""
    by_id: Mapping[str, Row] = field(init=False, repr=False)
    """The training rows by id. Held-out rows may reuse these ids: many sets count from 0 in each split."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {row.id: row for row in self.training})


def read_data(
    table: DataTable,
    *,
    instances: int,
    numbers: Collection[str | None] = frozenset({GSM8K}),
    has_reward: bool = False,
    by_position: bool = False,
) -> DataSet:
    """Read the data set of a job.

    `instances` is the most held-out rows to evaluate (evaluation.instances). For `numbers` see
    `refuse_unmatchable`, for `has_reward` `note_missing`, and for `by_position` `read_split`.
    """
    split = read_split(table.path, table.split, by_position=by_position)
    if table.held_out_share is None:
        path = table.evaluation_path or table.path
        other = read_split(path, table.held_out_split, by_position=by_position)
        training, held_out, splits = split.rows, other.rows, [split, other]
    else:
        training, held_out = split_rows(split, table.held_out_share, table.held_out_seed)
        splits = [split]
        for rows, what in ((training, "to train on"), (held_out, "to evaluate on")):
            if not rows:
                share_text = f"data.held_out_share = {table.held_out_share:g}"
                raise DataError(f"{share_text} leaves no row {what} of {len(split.rows)}", where=split.name)
    refuse_unmatchable(table, (*training, *held_out), numbers)
    evaluation = first_instances(held_out, instances, table.held_out_seed)
    counts = (
        f"data: {len(training)} rows to train on, {len(evaluation)} of {len(held_out)} held-out rows played"
    )
    sides: Sequence[tuple[Side, Sequence[Row]]] = (("training", training), ("held-out", held_out))
    identities = tuple(
        RowIdentity(side, row.id, row.content_digest(), row.task_digest(), row.where)
        for side, rows in sides
        for row in rows
    )
    missing = (
        note for item in splits for note in note_missing(table, item.name, item.rows, has_reward=has_reward)
    )
    notes = (counts, *map(_summary, splits), *missing, *_overlaps(identities))
    by_position = by_position and not all("id" in item.used for item in splits)
    return DataSet(training, evaluation, notes, identities, by_position)


def read_split(path: Path, split: str, *, by_position: bool = False) -> Split:
    """Read the rows of one split.

    A row without an id gets the digest of its content, which depends on neither format nor place. Further
    rows with equal content also get a number: `3f9c2a7be0d14585-2`. With `by_position` a row without an id
    gets its split and number instead, `train/17`, as before 2026-11-28.
    """
    parsed_rows: list[ParsedRow] = []
    keys: list[str] = []
    equal_rows: Counter[str] = Counter()
    places: dict[str, str] = {}
    used: dict[str, str] = {}
    unread: dict[str, None] = {}
    for file in find_files(path, split):
        for record in read_records(file):
            position = f"{split}/{len(parsed_rows)}" if by_position else None
            parsed = parse_row(record.columns, where=record.where, default_id=position)
            has_id = "id" in parsed.used or by_position
            keys.append(parsed.row.id if has_id else parsed.row.task_digest())
            if not has_id:
                digest = parsed.row.id
                equal_rows[digest] += 1
                if (number := equal_rows[digest]) > 1:
                    parsed = parsed._replace(row=replace(parsed.row, id=f"{digest}-{number}"))
            if parsed.row.id in places:
                raise DataError(
                    f"id {parsed.row.id!r} is also that of {places[parsed.row.id]}; each row has its own",
                    where=record.where,
                )
            if parsed_rows:
                _refuse_other_columns(parsed.used, used, record.where)
            used |= parsed.used
            places[parsed.row.id] = record.where
            unread |= dict.fromkeys(parsed.unread)
            parsed_rows.append(parsed)
    if not parsed_rows:
        raise DataError(f"split {split!r} has no rows", where=str(path))
    rows = tuple(item.row for item in parsed_rows)
    return Split(f"{split} of {path}", rows, tuple(keys), used, tuple(unread))


def _refuse_other_columns(row: Mapping[str, str], before: Mapping[str, str], where: str) -> None:
    """Refuse a row whose parts come from other columns than in the rows before.

    `truths` checks missing ground truths, since it knows whether the job reads them.
    """
    if row == before:
        return
    for what in sorted({*row, *before}):
        here, there = row.get(what), before.get(what)
        if here != there and (what != "ground_truth" or (here and there)):
            raise DataError(
                f"{what} comes from {here or 'nowhere'}, but in the rows before from {there or 'nowhere'}; "
                "all rows of a split have the same columns",
                where=where,
            )


def split_rows(split: Split, share: float, seed: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Split rows into training and held-out ones by a hash of each key.

    So a file with added rows still holds out the same rows, wherever the added rows are.
    """
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, key in zip(split.rows, split.keys, strict=True):
        sides[derived_seed(seed, "held out", key, below=_SHARES) < share * _SHARES].append(row)
    return tuple(sides[False]), tuple(sides[True])


def first_instances(rows: Sequence[Row], instances: int, seed: int) -> tuple[Row, ...]:
    """Return the first `instances` rows in the order of their ids' hashes, because files are often sorted."""
    order = sorted(rows, key=lambda row: derived_seed(seed, "instances", row.id))
    return tuple(order[:instances])


def _summary(split: Split) -> str:
    columns = ", ".join(f"{what} from {place}" for what, place in split.used.items())
    unread = f"; not read: {', '.join(split.unread)}" if split.unread else ""
    return f"{split.name}: {len(split.rows)} rows, {columns}{unread}"


def _overlaps(identities: Iterable[RowIdentity]) -> list[str]:
    """Warn if a held-out row has the prompt of a training row."""
    places: dict[str, str] = {}
    shared: list[tuple[str, str]] = []
    for row in identities:  # training rows come first
        if row.side == "training":
            places[row.task] = row.where
        elif row.task in places:
            shared.append((row.where, places[row.task]))
    if not shared:
        return []
    example = " = ".join(shared[0])
    return [f"warning: {len(shared)} held-out rows ask what a training row asks ({example})"]
