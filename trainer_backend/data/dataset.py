"""Reads the data set of a job, checks its rows, and splits them into training and held-out rows.

All rows are read before the first episode, so that a mistake in any row is reported at once. They stay in
memory, because a run plays all of them in shuffled epochs.
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
    """The split's name in messages, such as `train of data/gsm8k`."""
    rows: tuple[Row, ...]
    """The rows; ids are unique."""
    keys: tuple[str, ...]
    """For each row, the key that `split_rows` hashes: its id if the file gives one, else its task digest, so
    that rows without ids but with equal tasks are on the same side."""
    used: Mapping[str, str]
    """The column from which each part of a row was read, by part, such as `prompt`."""
    unread: tuple[str, ...] = ()
    """Names of the columns that were not read."""


class RowIdentity(NamedTuple):
    """Identifies a row, so that later commands can tell whether the row changed since the run began."""

    side: Side
    id: str
    content: str
    """`Row.content_digest`"""
    task: str
    """`Row.task_digest`"""
    where: str
    """The row's file and line."""


@dataclass(frozen=True, slots=True)
class DataSet:
    """The training rows of a job, and the held-out rows that each of its evaluations plays."""

    training: tuple[Row, ...]
    """Rows in the order of their files."""
    evaluation: tuple[Row, ...]
    """Held-out rows to play: the same in every job with equal [data] and `evaluation.instances`."""
    notes: tuple[str, ...] = ()
    """Lines about the data to show to the user, such as warnings."""
    identities: tuple[RowIdentity, ...] = ()
    """Identities of all training rows, and then of all held-out rows, also of those that are not played."""
    by_position: bool = False
    """Whether ids are positions, as `read_split` explains; false if the data set gives all rows ids."""
    by_id: Mapping[str, Row] = field(init=False, repr=False)
    """The training rows by id. Held-out rows are not included, because their ids may be the same: many data
    sets count from 0 in each split."""

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

    Args:
        instances: the most held-out rows to play (`evaluation.instances`).
        numbers: see `refuse_unmatchable`.
        has_reward: see `note_missing`.
        by_position: see `read_split`.
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

    A row without an id gets the digest of its content as its id. If several rows have equal content, the
    second and further ones get a number too: `3f9c2a7be0d14585-2`. With `by_position`, a row without an id
    gets its split and its position instead: `train/17`. Runs from before 2026-11-28 need these ids.
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
    """Refuse a row whose parts were read from other columns than those of the rows before.

    A missing ground truth is accepted, because `truths.note_missing` checks it.
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
    """Return the training rows and the held-out rows, of which there are about `share`.

    The hash of a row's key decides on which side the row is. So rows keep their side if the file grows.
    """
    sides: tuple[list[Row], list[Row]] = ([], [])
    for row, key in zip(split.rows, split.keys, strict=True):
        sides[derived_seed(seed, "held out", key, below=_SHARES) < share * _SHARES].append(row)
    return tuple(sides[False]), tuple(sides[True])


def first_instances(rows: Sequence[Row], instances: int, seed: int) -> tuple[Row, ...]:
    """Return a pseudo-random sample of at most `instances` rows, ordered by hashes of their ids."""
    order = sorted(rows, key=lambda row: derived_seed(seed, "instances", row.id))
    return tuple(order[:instances])


def _summary(split: Split) -> str:
    columns = ", ".join(f"{what} from {place}" for what, place in split.used.items())
    unread = f"; not read: {', '.join(split.unread)}" if split.unread else ""
    return f"{split.name}: {len(split.rows)} rows, {columns}{unread}"


def _overlaps(identities: Iterable[RowIdentity]) -> list[str]:
    """Return a warning if a held-out row has the same prompt and document as a training row."""
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
