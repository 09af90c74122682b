"""The data set of a job: its rows, checked and split into training and held-out ones.

All rows are in memory: a run plays all of them in shuffled epochs anyway, and a mistake in the last row is
reported before the first is played.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trainer_backend.core.seeds import derived_seed
from trainer_backend.data.layout import files_of
from trainer_backend.data.records import Record, read_records
from trainer_backend.data.rows import ParsedRow, Row, parse_row
from trainer_backend.data.truths import GSM8K, is_unmatchable, number_interactions, truth_error
from trainer_backend.errors import DataError, JobError
from trainer_backend.job.rollout_table import DataTable
from trainer_backend.job.schema import JobConfig

_SHARES = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Split:
    """The rows of one split, in the order of their files.

    Attributes:
        name: such as `train of data/gsm8k`.
        rows: with unique ids.
        used: the columns that were read, by the part of a row they became.
        unread: columns that nothing reads.
    """

    name: str
    rows: tuple[Row, ...]
    used: Mapping[str, str]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class DataSet:
    """Training rows, and held-out rows that every evaluation plays.

    Attributes:
        training: in the order of their files.
        evaluation: the same for every job with this data and held_out_seed.
        notes: lines for the user.
        by_id: the training rows; held-out ones may have equal ids, as many sets count anew in each split.
    """

    training: tuple[Row, ...]
    evaluation: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    by_id: Mapping[str, Row] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "by_id", {row.id: row for row in self.training})


def data_of(job: JobConfig) -> DataSet | None:
    """Read the rows that a job names; None if its environment makes its own worlds."""
    numbers = number_interactions(job.multi_turn.interaction_config_path)
    instances = job.evaluation.instances
    data = None if job.data is None else read_data(job.data, instances=instances, numbers=numbers)
    if job.multi_turn.interaction_config_path is not None and not _has_interactions(job.data, data):
        reason = (
            "no row has interaction_kwargs"
            if data is not None
            else "there is no [data] whose rows it answers"
        )
        raise JobError(
            f"the run would ignore it: {reason}",
            where="multi_turn.interaction_config_path",
            hint="data.interaction names the interaction of rows that name none.",
        )
    return data


def _has_interactions(table: DataTable | None, data: DataSet | None) -> bool:
    if data is None or table is None:
        return False
    rows = (*data.training, *data.evaluation)
    return table.interaction is not None or any(row.interaction is not None for row in rows)


def read_data(
    table: DataTable, *, instances: int, numbers: Collection[str | None] = frozenset({GSM8K})
) -> DataSet:
    """Read the data set of a job.

    Args:
        instances: the most held-out rows to evaluate (evaluation.instances).
        numbers: of `refuse_unmatchable`.
    """
    split = read_split(table.path, table.split)
    if table.held_out_share is None:
        other = read_split(table.evaluation_path or table.path, table.held_out_split)
        training, held_out, splits = split.rows, other.rows, [split, other]
    else:
        training, held_out = _split_rows(split.rows, table.held_out_share, table.held_out_seed)
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
    return DataSet(training, evaluation, (counts, *map(_summary, splits), *_overlaps(training, held_out)))


def refuse_unmatchable(table: DataTable, rows: Iterable[Row], numbers: Collection[str | None]) -> None:
    """Refuse rows whose ground truth no answer can equal, because their interaction needs a number.

    Args:
        rows: of `table`. If one is refused, all files of the table are searched.
        numbers: the names of the interactions that need a number; None is that of rows that name none.

    Raises:
        DataError: with the places of the rows.
    """
    bad = [row for row in rows if is_unmatchable(row, table, numbers)]
    if not bad:
        return
    splits = [(table.path, table.split)]
    if table.held_out_share is None:
        splits.append((table.evaluation_path or table.path, table.held_out_split))
    found = [
        (record.where, row)
        for path, split in splits
        for row, record in zip(read_split(path, split).rows, _records(path, split), strict=True)
        if is_unmatchable(row, table, numbers)
    ]
    # The files may have changed since the rows were read.
    raise truth_error(found or [(f"{table.path}: row {row.id}", row) for row in bad], table)


def _records(path: Path, split: str) -> Iterator[Record]:
    for file in files_of(path, split):
        yield from read_records(file)


def read_split(path: Path, split: str) -> Split:
    """Read the rows of one split.

    A row without an id gets its split and number, such as `train/17`, whatever the format.
    """
    parsed_rows: list[ParsedRow] = []
    places: dict[str, str] = {}
    unread: dict[str, None] = {}
    for file in files_of(path, split):
        for record in read_records(file):
            parsed = parse_row(record.columns, where=record.where, default_id=f"{split}/{len(parsed_rows)}")
            if parsed.row.id in places:
                raise DataError(
                    f"id {parsed.row.id!r} is also that of {places[parsed.row.id]}; each row has its own",
                    where=record.where,
                )
            if parsed_rows:
                _refuse_other_columns(parsed, parsed_rows[0], record.where)
            places[parsed.row.id] = record.where
            unread |= dict.fromkeys(parsed.unread)
            parsed_rows.append(parsed)
    if not parsed_rows:
        raise DataError(f"split {split!r} has no rows", where=str(path))
    rows = tuple(item.row for item in parsed_rows)
    return Split(f"{split} of {path}", rows, parsed_rows[0].used, tuple(unread))


def _refuse_other_columns(row: ParsedRow, first: ParsedRow, where: str) -> None:
    """Refuse a row with other columns than the first, as their meanings would differ."""
    if row.used == first.used:
        return
    for what in sorted({*row.used, *first.used}):
        here, there = row.used.get(what), first.used.get(what)
        if here != there:
            raise DataError(
                f"{what} comes from {here or 'nowhere'}, but in the first row from {there or 'nowhere'}; "
                "all rows of a split have the same columns",
                where=where,
            )


def _split_rows(rows: Sequence[Row], share: float, seed: int) -> tuple[tuple[Row, ...], tuple[Row, ...]]:
    """Split rows into training and held-out ones by a hash of each id.

    A longer file with the same rows therefore holds out the same ones and more.
    """
    held_out = {
        row.id for row in rows if derived_seed(seed, "held out", row.id, below=_SHARES) < share * _SHARES
    }
    return (
        tuple(row for row in rows if row.id not in held_out),
        tuple(row for row in rows if row.id in held_out),
    )


def first_instances(rows: Sequence[Row], instances: int, seed: int) -> tuple[Row, ...]:
    """Return the first rows in the order of a hash of their ids, because files are often sorted."""
    order = sorted(rows, key=lambda row: derived_seed(seed, "instances", row.id))
    return tuple(order[:instances])


def _summary(split: Split) -> str:
    columns = ", ".join(f"{what} from {place}" for what, place in split.used.items())
    unread = f"; not read: {', '.join(split.unread)}" if split.unread else ""
    return f"{split.name}: {len(split.rows)} rows, {columns}{unread}"


def _overlaps(training: Sequence[Row], held_out: Sequence[Row]) -> list[str]:
    """Warn if a held-out row has the prompt of a training row."""
    ids = {_key(row): row.id for row in training}
    shared = [(row.id, ids[_key(row)]) for row in held_out if _key(row) in ids]
    if not shared:
        return []
    example = " = ".join(shared[0])
    return [f"warning: {len(shared)} held-out rows ask what a training row asks ({example})"]


def _key(row: Row) -> tuple[object, ...]:
    messages = row.prompt if isinstance(row.prompt, str) else tuple(m["content"] for m in row.prompt)
    return messages, row.document
