"""RUN/data.parquet records a run's training rows and held-out rows, and the training rows of earlier starts.

A resumed run compares the record with the current rows. Earlier training rows stay in the record, because
held-out rows that ask the same question are leaks.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from trainer_backend.data.dataset import DataSet, RowIdentity, Side
from trainer_backend.errors import DataError, RunDirectoryError
from trainer_backend.job.rollout_table import DataTable
from trainer_backend.rundir.files import replacement
from trainer_backend.rundir.layout import DATA_RECORD, RunDirectory

# Metadata of the file: whether ids are positions, as in runs from before 2026-11-28.
_BY_POSITION = b"turnwise.by_position"
# Column: the last iteration that may have played an earlier row; null for current rows.
_UNTIL = "until"
_SCHEMA = pa.schema([*((name, pa.string()) for name in RowIdentity._fields), (_UNTIL, pa.int64())])
_MOST_NAMED = 3
_DIFFERENT = "held-out rows of one id have different content"


class Earlier(NamedTuple):
    row: RowIdentity
    until: int
    """The last iteration that may have played the row."""


@dataclass(frozen=True, slots=True)
class DataRecord:
    rows: tuple[RowIdentity, ...]
    """The rows that the run's last start used, training rows first."""
    by_position: bool
    """Whether ids are positions in the file. If so, equal ids of two runs may mean different rows."""
    earlier: tuple[Earlier, ...] = ()
    """Training rows of earlier starts that were since removed, changed, or moved to the held-out rows."""

    def followed_by(self, rows: Sequence[RowIdentity], iteration: int) -> "DataRecord":
        """Return the record of a start that uses these rows and continues after `iteration`.

        Training rows that are not among them move to `earlier`, with `iteration` as `until`.
        """
        stays = {(row.id, row.content) for row in _on_side("training", rows)}
        before = [*self.earlier, *(Earlier(row, iteration) for row in _on_side("training", self.rows))]
        trained = {(item.row.id, item.row.content): item for item in before}
        earlier = tuple(item for key, item in trained.items() if key not in stays)
        return replace(self, rows=tuple(rows), earlier=earlier)

    def find_replaced(self, iteration: int) -> set[str]:
        """Return the ids of training rows, since changed or removed, that an iteration may have played."""
        return {item.row.id for item in self.earlier if iteration <= item.until}

    @property
    def trained(self) -> list[RowIdentity]:
        """All rows that were training rows at some start."""
        return [*(item.row for item in self.earlier), *_on_side("training", self.rows)]

    def describe_leaks(self, rows: Sequence[RowIdentity] | None = None) -> str:
        """Return text on how many held-out rows ask the same question as a training row; empty if none.

        Args:
            rows: the current rows; None for the rows of the record.
        """
        trained = {row.task for row in self.trained}
        held_out = _on_side("held-out", self.rows if rows is None else rows)
        leaked = sum(row.task in trained for row in held_out)
        return f"{leaked} of {len(held_out)} held-out rows ask what the run trained on" if leaked else ""


def _on_side(side: Side, rows: Sequence[RowIdentity]) -> list[RowIdentity]:
    return [row for row in rows if row.side == side]


def accept_rows(
    record: DataRecord | None, table: DataTable | None, data: DataSet | None, *, accept_changes: bool = False
) -> DataSet | None:
    """Raise DataError if the data set changed since the run began, unless `accept_changes` is true.

    Returns the data set with notes about accepted changes and about leaks. It does not store the new rows;
    `record_rows` does.
    """
    if data is None or record is None or table is None:
        return data
    changes, leaks = find_differences(record, table, data)
    found = "; ".join(filter(None, (changes, leaks)))
    if changes and not accept_changes:
        raise DataError(
            f"since the run began, {found}",
            where=str(table.path),
            hint="Restore the data, start a new run, or accept these rows: turnwise train --resume RUN "
            "--accept-data.",
        )
    if found:
        begins = "data: accepted, although since the run began" if changes else "warning:"
        data = replace(data, notes=(*data.notes, f"{begins} {found}"))
    return data


def record_rows(run: RunDirectory, record: DataRecord | None, data: DataSet | None, iteration: int) -> None:
    """Record the current rows of a run that continues after `iteration`. Call it before any rollout."""
    if data is None:
        return
    if record is None:
        _write_record(run, DataRecord(data.identities, data.by_position))
    elif record.rows != data.identities:
        _write_record(run, record.followed_by(data.identities, iteration))


def find_differences(record: DataRecord, table: DataTable, data: DataSet) -> tuple[str, str]:
    """Describe the changes since the record was written, and leaked held-out rows; each text may be empty.

    A changed order counts as a change only with data.shuffle = false.
    """
    changes = _changes(record.rows, data.identities, in_order=not table.shuffle)
    return "; ".join(changes), record.describe_leaks(data.identities)


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
            sides = Counter(row.side for row in rows)
            counts = " and ".join(f"{count} {side}" for side, count in sides.items())
            are = "rows are" if len(rows) > 1 else "row is"
            named = ", ".join(f"{row.id} ({row.where})" for row in rows[:_MOST_NAMED])
            more = f" and {len(rows) - _MOST_NAMED} more" if len(rows) > _MOST_NAMED else ""
            yield f"{counts} {are} {what}: {named}{more}"
    if in_order and not gone and not added and [*old] != [*new]:
        yield "the order of the rows changed, and data.shuffle is false"


def find_other_rows(first: DataRecord, other: DataRecord) -> set[str]:
    """Find the ids that name different held-out rows in two runs."""
    contents = {row.id: row.content for row in _on_side("held-out", first.rows)}
    return {
        row.id for row in _on_side("held-out", other.rows) if contents.get(row.id, row.content) != row.content
    }


def describe_mismatch(first: DataRecord, other: DataRecord) -> list[str]:
    """List reasons why comparing results of two runs on held-out rows would be impossible or unfair."""
    ids = [{row.id for row in _on_side("held-out", record.rows)} for record in (first, other)]
    differ, shared = find_other_rows(first, other), ids[0] & ids[1]
    cannot = first.by_position != other.by_position and not shared - differ
    leaked = max(_count_leaked(first, other), _count_leaked(other, first))
    return [
        *(["one run names its rows by position, so no rows can be paired"] if cannot else []),
        *([f"{len(differ)} {_DIFFERENT}, and are not paired"] if differ else []),
        *([f"one run trained on what {leaked} held-out rows of the other ask"] if leaked else []),
    ]


def _count_leaked(first: DataRecord, other: DataRecord) -> int:
    """Count the held-out rows of `other` whose questions `first` trained on, but `other` did not."""
    trained = {row.task for row in first.trained} - {row.task for row in other.trained}
    return sum(row.task in trained for row in _on_side("held-out", other.rows))


def read_record(run: RunDirectory) -> DataRecord | None:
    """Read a run's record; None if the run has none, or if nothing has been played yet."""
    path = run.path / DATA_RECORD
    if not path.exists() or not run.has_played():
        return None
    try:
        table = pq.read_table(path, schema=_SCHEMA)
        by_position = pq.read_schema(path).metadata.get(_BY_POSITION) == b"true"
    except (OSError, pa.ArrowException) as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    *columns, until = table.to_pydict().values()
    rows = list(zip(map(RowIdentity._make, zip(*columns, strict=True)), until, strict=True))
    earlier = tuple(Earlier(row, last) for row, last in rows if last is not None)
    return DataRecord(tuple(row for row, last in rows if last is None), by_position, earlier)


def _write_record(run: RunDirectory, record: DataRecord) -> None:
    rows = [*((*row, None) for row in record.rows), *((*row, until) for row, until in record.earlier)]
    table = pa.table(dict(zip(_SCHEMA.names, zip(*rows, strict=True), strict=True)), schema=_SCHEMA)
    table = table.replace_schema_metadata({_BY_POSITION: str(record.by_position).lower()})
    with replacement(run.path / DATA_RECORD, pa.ArrowException) as aside:
        pq.write_table(table, aside, compression="zstd")
