"""RUN/data.parquet: the rows that a run began with, which a resume compares with those of its files now."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_backend.data.dataset import DataSet, RowIdentity, data_of
from trainer_backend.errors import DataError, RunDirectoryError
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.files import replacement
from trainer_backend.rundir.layout import DATA_RECORD, RunDirectory

# Whether ids are positions, which they are in runs from before 2026-11-28. Such a run keeps them.
_BY_POSITION = b"turnwise.by_position"
_SCHEMA = pa.schema([(name, pa.string()) for name in RowIdentity._fields])
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The rows of a run, training rows first.

    Attributes:
        by_position: whether ids are positions, so that equal ids of two runs may be different rows.
    """

    rows: tuple[RowIdentity, ...]
    by_position: bool


def read_run_data(run: RunDirectory, job: JobConfig) -> DataSet | None:
    """Read the rows that a job names, with the ids that this run uses."""
    return _read_data(run, job, read_record(run))


def continue_with_data(run: RunDirectory, job: JobConfig, *, accept_changes: bool) -> DataSet | None:
    """Read the rows of a run that starts or continues, and record them.

    Args:
        accept_changes: take the rows as they are; the notes of the data set then tell what changed.

    Raises:
        DataError: the rows are not those that the run began with.
    """
    record = read_record(run)
    data = _read_data(run, job, record)
    if data is None:
        return None
    changes = _describe(record, job, data)
    if changes and not accept_changes:
        raise _refusal(job, changes)
    if changes:
        data = replace(data, notes=(*data.notes, f"data: accepted, although since the run began {changes}"))
    if record is None or record.rows != data.identities:
        _write_record(run, DataRecord(data.identities, _uses_positions(run, record)))
    return data


def refuse_changes(run: RunDirectory, job: JobConfig, data: DataSet | None) -> None:
    """Refuse rows that are not those that the run began with.

    Raises:
        DataError: with what changed.
    """
    if data is not None and (changes := describe_changes(run, job, data)):
        raise _refusal(job, changes)


def _refusal(job: JobConfig, changes: str) -> DataError:
    return DataError(
        f"since the run began, {changes}",
        where="data.path" if job.data is None else str(job.data.path),
        hint="Restore the data, start a new run, or accept these rows: turnwise train --resume RUN "
        "--accept-data.",
    )


def _read_data(run: RunDirectory, job: JobConfig, record: DataRecord | None) -> DataSet | None:
    return data_of(job, by_position=job.data is not None and _uses_positions(run, record))


def describe_changes(run: RunDirectory, job: JobConfig, data: DataSet) -> str:
    """Describe how rows differ from those that the run began with; empty if they do not.

    A run without a record cannot tell. The order counts where training follows it (data.shuffle = false).
    """
    return _describe(read_record(run), job, data)


def _describe(record: DataRecord | None, job: JobConfig, data: DataSet) -> str:
    if record is None:
        return ""
    in_order = job.data is not None and not job.data.shuffle
    return "; ".join(_changes(record.rows, data.identities, in_order=in_order))


def _changes(before: Sequence[RowIdentity], now: Sequence[RowIdentity], *, in_order: bool) -> Iterator[str]:
    old, new = ({(row.side, row.id): row for row in rows} for rows in (before, now))
    gone = [row for key, row in old.items() if key not in new]
    added = [row for key, row in new.items() if key not in old]
    moved_ids = {row.id for row in gone} & {row.id for row in added}
    kinds = {
        "gone": [row for row in gone if row.id not in moved_ids],
        "new": [row for row in added if row.id not in moved_ids],
        "changed under the same id": [
            row for key, row in new.items() if key in old and row.content != old[key].content
        ],
        "on the other side of the split": [row for row in added if row.id in moved_ids],
    }
    for what, rows in kinds.items():
        if rows:
            yield _count_by_side(rows, what)
    if in_order and not gone and not added and [*old] != [*new]:
        yield "the order of the rows changed, and data.shuffle is false"
    if leaked := _count_leaked(before, now):
        held_out = sum(row.side == "held-out" for row in now)
        yield f"{leaked} of {held_out} held-out rows ask what the run trained on"


def _count_by_side(rows: Sequence[RowIdentity], what: str) -> str:
    sides = Counter(row.side for row in rows)
    counts = " and ".join(f"{count} {side}" for side, count in sides.items())
    named = ", ".join(f"{row.id} ({row.where})" for row in rows[:_MOST_NAMED])
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{counts} row{'s' * (len(rows) > 1)} {'are' if len(rows) > 1 else 'is'} {what}: {named}{more}"


def _count_leaked(before: Sequence[RowIdentity], now: Sequence[RowIdentity]) -> int:
    """Count held-out rows whose task was in training before, unless it was on both sides already."""
    trained = {row.task for row in before if row.side == "training"}
    trained -= {row.task for row in before if row.side == "held-out"}
    return sum(row.side == "held-out" and row.task in trained for row in now)


def describe_mismatch(first: DataRecord, other: DataRecord) -> list[str]:
    """Say why held-out rows that two runs share under one id cannot be compared; empty if they can."""
    contents = {row.id: row.content for row in first.rows if row.side == "held-out"}
    differ = sum(
        row.side == "held-out" and contents.get(row.id, row.content) != row.content for row in other.rows
    )
    leaked = max(_count_leaked(first.rows, other.rows), _count_leaked(other.rows, first.rows))
    names_differ = first.by_position != other.by_position
    return [
        *(["one run names its rows by position, so no rows can be paired"] if names_differ else []),
        *([f"{differ} held-out rows of the same id have different content"] if differ else []),
        *([f"one run trained on what {leaked} held-out rows of the other ask"] if leaked else []),
    ]


def _uses_positions(run: RunDirectory, record: DataRecord | None) -> bool:
    if record is not None:
        return record.by_position
    # A run of this version writes its record before anything is played.
    return any(run.rollouts.glob("*")) or any(run.checkpoints.glob("*"))


def read_record(run: RunDirectory) -> DataRecord | None:
    """Read the rows that a run began with; None for runs without [data], or from before 2026-11-28."""
    path = run.path / DATA_RECORD
    if not path.exists():
        return None
    try:
        table = pq.read_table(path, schema=_SCHEMA)
        by_position = pq.read_schema(path).metadata.get(_BY_POSITION) == b"true"
    except (OSError, pa.ArrowException) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    return DataRecord(
        tuple(map(RowIdentity._make, zip(*table.to_pydict().values(), strict=True))), by_position
    )


def _write_record(run: RunDirectory, record: DataRecord) -> None:
    table = pa.table(dict(zip(_SCHEMA.names, zip(*record.rows, strict=True), strict=True)), schema=_SCHEMA)
    table = table.replace_schema_metadata({_BY_POSITION: str(record.by_position).lower()})
    with replacement(run.path / DATA_RECORD, pa.ArrowException) as aside:
        pq.write_table(table, aside, compression="zstd")
