"""Files that grow line by line (metrics.jsonl and the ledger): a sync reads only their new lines."""

import hashlib
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from sqlalchemy import Connection, delete, insert, select

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import object_of
from trainer_backend.rundir.spool import duplicate_error, plan_id
from trainer_backend.store.database import Store
from trainer_backend.store.tables import (
    Curve,
    Iteration,
    LedgerRow,
    Metric,
    MetricRow,
    SyncedFile,
    job_number,
)

Row = Mapping[str, Any]
# A digest of the last bytes before the mark: if it is equal, the file has only grown.
_TAIL = 256
# Ids in one query: a database refuses tens of thousands.
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class FileMark:
    """A row of synced_files: how far a file was copied."""

    number: int
    size: int
    modified_ns: int
    digest: str | None
    decisions: bool


MARK = [getattr(SyncedFile, name) for name in FileMark.__slots__]


@dataclass(frozen=True, slots=True)
class NewLines:
    """The lines of a file that the store lacks."""

    rows: Sequence[Row]
    whole: bool
    """Whether these are all lines of the file: it is new, or was rewritten."""
    end: int
    """The byte at which the next lines begin; `digest` covers the bytes before it."""
    digest: str
    modified_ns: int


# Stores new lines: called with a connection, the number of the job, and the lines.
Put = Callable[[Connection, int, NewLines], None]


def sync_lines(store: Store, job_id: str, path: Path, marks: Mapping[str, FileMark], put: Put) -> bool:
    """Copy the new lines of a file into the store with `put`; return whether there were any."""
    known = marks.get(path.name)
    try:
        facts = path.stat()
        if known is not None and (facts.st_size, facts.st_mtime_ns) == (known.size, known.modified_ns):
            return False
    except FileNotFoundError:
        if known is None:
            return False
    with store.write() as connection:
        job = job_number(connection, job_id, lock=True)
        # Read again: a concurrent sync may have finished first.
        query = select(*MARK).where(SyncedFile.job == job, SyncedFile.name == path.name)
        row = connection.execute(query).first()
        mark = None if row is None else FileMark(*row)
        new = _new_lines(path, mark)
        if new is None:
            return False
        put(connection, job, new)
        _remember(connection, job, path.name, mark, new)
    return bool(new.rows) or new.whole


def _new_lines(path: Path, mark: FileMark | None) -> NewLines | None:
    """Read the new lines of a file; None: the file does not exist and never did."""
    try:
        with path.open("rb") as file:  # opened once: a concurrent replacement is seen whole or not at all
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            data, begin, old = _read_on(file, mark)
    except FileNotFoundError:
        return None if mark is None else NewLines((), True, 0, _digest(b""), 0)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    end = data.rfind(b"\n") + 1
    rows = tuple(_rows(data[old:end]))
    return NewLines(rows, begin + old == 0, begin + end, _digest(data[:end]), modified_ns)


def _read_on(file: BinaryIO, mark: FileMark | None) -> tuple[bytes, int, int]:
    """Return bytes of the file, their position in it, and how many of them were read before."""
    if mark is not None:
        begin = max(0, mark.size - _TAIL)
        file.seek(begin)
        data = file.read()
        old = mark.size - begin
        if len(data) >= old and _digest(data[:old]) == mark.digest:
            return data, begin, old
        file.seek(0)
    return file.read(), 0, 0


def _rows(data: bytes) -> Iterator[Row]:
    """Parse whole lines as every reader of these files does; a line that a crash cut short is skipped."""
    return (row for line in data.split(b"\n") if (row := object_of(line)) is not None)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data[-_TAIL:], digest_size=12).hexdigest()


def _remember(connection: Connection, job: int, name: str, mark: FileMark | None, new: NewLines) -> None:
    if mark is not None:
        connection.execute(delete(SyncedFile).where(SyncedFile.number == mark.number))
    connection.execute(
        insert(SyncedFile).values(
            job=job, name=name, size=new.end, modified_ns=new.modified_ns, digest=new.digest, decisions=False
        )
    )


def put_metrics(connection: Connection, job: int, new: NewLines) -> None:
    """Store rows of metrics; the later of two rows of one kind and iteration wins."""
    rows = {(str(row.get("kind", "")), int(row.get("iteration", 0))): row for row in new.rows}
    stale, new_rows = _difference(connection, job, rows) if new.whole else (rows.keys(), rows)
    _forget(connection, job, stale)
    if not new_rows:
        return
    lines = [
        {"job": job, "kind": kind, "iteration": iteration, "row": row}
        for (kind, iteration), row in new_rows.items()
    ]
    connection.execute(insert(MetricRow), lines)
    _put_points(connection, job, new_rows)
    finished = datetime.fromtimestamp(new.modified_ns / 1e9, UTC)
    iterations = [
        {"job": job, "iteration": i, "policy_version": row.get("policy/version"), "finished": finished}
        for (kind, i), row in new_rows.items()
        if kind == "iteration"
    ]
    if iterations:
        connection.execute(insert(Iteration), iterations)


def _difference(
    connection: Connection, job: int, rows: Mapping[tuple[str, int], Row]
) -> tuple[Iterable[tuple[str, int]], dict[tuple[str, int], Row]]:
    """Return the keys of stored rows that the file lacks, and the file's rows that the store lacks."""
    query = select(MetricRow.kind, MetricRow.iteration, MetricRow.row).where(MetricRow.job == job)
    stored = {(line.kind, line.iteration): line.row for line in connection.execute(query)}
    stale = [key for key, row in stored.items() if rows.get(key) != row]
    return stale, {key: row for key, row in rows.items() if stored.get(key) != row}


def _forget(connection: Connection, job: int, keys: Iterable[tuple[str, int]]) -> None:
    for kind, iteration in keys:
        of_row = (MetricRow.job == job, MetricRow.kind == kind, MetricRow.iteration == iteration)
        if not connection.execute(delete(MetricRow).where(*of_row)).rowcount:
            continue
        curves = select(Curve.number).where(Curve.job == job, Curve.kind == kind)
        connection.execute(delete(Metric).where(Metric.curve.in_(curves), Metric.iteration == iteration))
        if kind == "iteration":
            iteration_row = (Iteration.job == job, Iteration.iteration == iteration)
            connection.execute(delete(Iteration).where(*iteration_row))


def _put_points(connection: Connection, job: int, rows: Mapping[tuple[str, int], Row]) -> None:
    points = [
        (kind, name, iteration, value)
        for (kind, iteration), row in rows.items()
        for name, value in numbers_of(row)
    ]
    curves = _curves(connection, job, {(kind, name) for kind, name, *_ in points})
    values = [
        {"curve": curves[kind, name], "iteration": i, "value": value} for kind, name, i, value in points
    ]
    if values:
        connection.execute(insert(Metric), values)


def _curves(connection: Connection, job: int, names: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
    query = select(Curve.kind, Curve.name, Curve.number).where(Curve.job == job)
    numbers = {(row.kind, row.name): row.number for row in connection.execute(query)}
    new = sorted(names - numbers.keys())
    if new:
        values = [{"job": job, "kind": kind, "name": name} for kind, name in new]
        rows = connection.execute(insert(Curve).returning(Curve.kind, Curve.name, Curve.number), values)
        numbers |= {(row.kind, row.name): row.number for row in rows}
    return numbers


def numbers_of(row: Row) -> Iterator[tuple[str, float]]:
    """Yield the finite numbers of a row by name; a number in a dict is `name/key`.

    Lists and texts are skipped.
    """
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", number) for key, number in numbers_of(value))
        elif isinstance(value, int | float) and name not in ("kind", "iteration") and math.isfinite(value):
            yield name, float(value)


def put_ledger(connection: Connection, job: int, new: NewLines) -> None:
    """Store the rollouts that updates learned from."""
    if new.whole:
        connection.execute(delete(LedgerRow).where(LedgerRow.job == job))
    values = [
        {
            "job": job,
            "planned": plan_id(rollout_id),
            "rollout_id": rollout_id,
            "iteration": int(row.get("iteration", 0)),
        }
        for row in new.rows
        for rollout_id in row.get("rollout_ids", ())
    ]
    _refuse_twice(connection, job, values)
    if values:
        connection.execute(insert(LedgerRow), values)


def _refuse_twice(connection: Connection, job: int, values: Sequence[Mapping[str, Any]]) -> None:
    iterations: dict[str, int] = {}
    for value in values:
        if value["planned"] in iterations:
            raise duplicate_error(value["planned"], iterations[value["planned"]], value["iteration"])
        iterations[value["planned"]] = value["iteration"]
    ids = list(iterations)
    for first in range(0, len(ids), _AT_ONCE):
        mine = (LedgerRow.job == job, LedgerRow.planned.in_(ids[first : first + _AT_ONCE]))
        row = connection.execute(select(LedgerRow.planned, LedgerRow.iteration).where(*mine)).first()
        if row is not None:
            raise duplicate_error(row.planned, row.iteration, iterations[row.planned])
