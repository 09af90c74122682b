"""RUN/data.parquet: the rows that a run trains and is evaluated on, and those that it trained on earlier.

A resume compares them with the rows of its files now. A row that was once a training row stays in the record,
because whatever asks the same is no held-out row of this run any more.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_backend.data.dataset import DataSet, RowIdentity, Side, data_of
from trainer_backend.errors import DataError, RunDirectoryError
from trainer_backend.job.schema import JobConfig
from trainer_backend.rundir.files import replacement
from trainer_backend.rundir.layout import DATA_RECORD, RunDirectory

# Whether ids are positions, which they are in runs from before 2026-11-28. Such a run keeps them.
_BY_POSITION = b"turnwise.by_position"
_SCHEMA = pa.schema([(name, pa.string()) for name in RowIdentity._fields])
# In the column `side`; elsewhere these rows are training rows.
_EARLIER = "earlier"
_MOST_NAMED = 3


@dataclass(frozen=True, slots=True)
class DataRecord:
    """The rows of a run.

    Attributes:
        rows: those of its last start, training rows first.
        by_position: whether ids are positions, so that equal ids of two runs may be different rows.
        earlier: training rows of earlier starts that are gone, changed, or held out since.
    """

    rows: tuple[RowIdentity, ...]
    by_position: bool
    earlier: tuple[RowIdentity, ...] = ()

    def followed_by(self, rows: Sequence[RowIdentity]) -> "DataRecord":
        """The record once these rows are accepted."""
        stays = {(row.id, row.content) for row in _on_side("training", rows)}
        trained = {(row.id, row.content): row for row in self.trained}
        earlier = tuple(row for key, row in trained.items() if key not in stays)
        return replace(self, rows=tuple(rows), earlier=earlier)

    @property
    def trained(self) -> list[RowIdentity]:
        """All rows that were training rows at some start."""
        return [*self.earlier, *_on_side("training", self.rows)]

    def describe_leaks(self, rows: Sequence[RowIdentity] | None = None) -> str:
        """Say how many held-out rows ask what the run trained on; empty if none does.

        What stands on both sides from the start counts no more than once: reading the data warns of it.

        Args:
            rows: of today; None: those of the record.
        """
        now = self.rows if rows is None else rows
        on_both = {row.task for row in _on_side("training", self.rows)}
        on_both &= {row.task for row in _on_side("held-out", self.rows)}
        on_both &= {row.task for row in _on_side("training", now)}
        trained = {row.task for row in self.trained} - on_both
        held_out = _on_side("held-out", now)
        leaked = sum(row.task in trained for row in held_out)
        return f"{leaked} of {len(held_out)} held-out rows ask what the run trained on" if leaked else ""


def _on_side(side: Side, rows: Sequence[RowIdentity]) -> list[RowIdentity]:
    return [row for row in rows if row.side == side]


def read_run_data(run: RunDirectory, job: JobConfig) -> DataSet | None:
    """Read the rows that a job names, with the ids that this run uses."""
    return _read_data(run, job, read_record(run))


def read_data_to_continue(
    run: RunDirectory, job: JobConfig, *, accept_changes: bool
) -> tuple[DataSet | None, DataRecord | None]:
    """Read the rows of a run that starts or continues.

    Args:
        accept_changes: take the rows as they are; the notes of the data set then tell what changed.

    Returns:
        The rows, and the record to write before they are played, None if the one that is there stays.

    Raises:
        DataError: the rows are not those that the run began with.
    """
    record = read_record(run)
    data = _read_data(run, job, record)
    if data is None:
        return None, None
    if record is None:
        return data, DataRecord(data.identities, data.by_position)
    changes = describe_changes(record, job, data)
    if changes and not accept_changes:
        raise _refusal(job, changes, record.describe_leaks(data.identities))
    told = "; ".join(filter(None, (changes, record.describe_leaks(data.identities))))
    if told:
        told = f"data: accepted, although since the run began {told}" if changes else f"warning: {told}"
        data = replace(data, notes=(*data.notes, told))
    return data, None if record.rows == data.identities else record.followed_by(data.identities)


def refuse_changes(record: DataRecord | None, job: JobConfig, data: DataSet | None) -> None:
    """Refuse rows that are not those of the record.

    Raises:
        DataError: with what changed.
    """
    if record is not None and data is not None and (changes := describe_changes(record, job, data)):
        raise _refusal(job, changes, record.describe_leaks(data.identities))


def _refusal(job: JobConfig, *changes: str) -> DataError:
    return DataError(
        f"since the run began, {'; '.join(filter(None, changes))}",
        where="data.path" if job.data is None else str(job.data.path),
        hint="Restore the data, start a new run, or accept these rows: turnwise train --resume RUN "
        "--accept-data.",
    )


def _read_data(run: RunDirectory, job: JobConfig, record: DataRecord | None) -> DataSet | None:
    # A run of this version writes its record before anything is played.
    by_position = record.by_position if record is not None else run.has_played()
    return data_of(job, by_position=job.data is not None and by_position)


def describe_changes(record: DataRecord, job: JobConfig, data: DataSet) -> str:
    """Describe how rows differ from those of the record; empty if they do not.

    The order counts where training follows it (data.shuffle = false).
    """
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


def _count_by_side(rows: Sequence[RowIdentity], what: str) -> str:
    sides = Counter(row.side for row in rows)
    counts = " and ".join(f"{count} {side}" for side, count in sides.items())
    named = ", ".join(f"{row.id} ({row.where})" for row in rows[:_MOST_NAMED])
    more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
    return f"{counts} row{'s' * (len(rows) > 1)} {'are' if len(rows) > 1 else 'is'} {what}: {named}{more}"


def find_other_rows(first: DataRecord, other: DataRecord) -> set[str]:
    """Find the ids that name different held-out rows in two runs; all, where only one names by position."""
    contents = {row.id: row.content for row in _on_side("held-out", first.rows)}
    named_alike = first.by_position == other.by_position
    return {
        row.id
        for row in _on_side("held-out", other.rows)
        if row.id in contents and not (named_alike and contents[row.id] == row.content)
    }


def describe_mismatch(first: DataRecord, other: DataRecord) -> list[str]:
    """Say why held-out rows of two runs cannot be compared, or not as equals; empty if they can."""
    names_differ = first.by_position != other.by_position
    differ = 0 if names_differ else len(find_other_rows(first, other))
    leaked = max(_count_leaked(first, other), _count_leaked(other, first))
    return [
        *(["one run names its rows by position, so no rows can be paired"] if names_differ else []),
        *([f"{differ} held-out rows of one id have different content, and are not paired"] if differ else []),
        *([f"one run trained on what {leaked} held-out rows of the other ask"] if leaked else []),
    ]


def _count_leaked(first: DataRecord, other: DataRecord) -> int:
    """Count the held-out rows of one run that only the other one trained on."""
    trained = {row.task for row in first.trained} - {row.task for row in other.trained}
    return sum(row.task in trained for row in _on_side("held-out", other.rows))


def read_record(run: RunDirectory) -> DataRecord | None:
    """Read the rows of a run; None if it has no [data], is from before 2026-11-28, or has played nothing."""
    path = run.path / DATA_RECORD
    if not path.exists() or not run.has_played():
        return None
    try:
        table = pq.read_table(path, schema=_SCHEMA)
        by_position = pq.read_schema(path).metadata.get(_BY_POSITION) == b"true"
    except (OSError, pa.ArrowException) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    rows = list(map(RowIdentity._make, zip(*table.to_pydict().values(), strict=True)))
    earlier = tuple(row._replace(side="training") for row in rows if row.side not in get_args(Side))
    return DataRecord(tuple(row for row in rows if row.side in get_args(Side)), by_position, earlier)


def write_record(run: RunDirectory, record: DataRecord) -> None:
    rows = [*record.rows, *((_EARLIER, *row[1:]) for row in record.earlier)]
    table = pa.table(dict(zip(_SCHEMA.names, zip(*rows, strict=True), strict=True)), schema=_SCHEMA)
    table = table.replace_schema_metadata({_BY_POSITION: str(record.by_position).lower()})
    with replacement(run.path / DATA_RECORD, pa.ArrowException) as aside:
        pq.write_table(table, aside, compression="zstd")
