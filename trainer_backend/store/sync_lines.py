"""Files that grow line by line: metrics.jsonl and the ledger. Only what is new in them is read."""

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
from trainer_backend.rundir.spool import learned_twice, planned_id
from trainer_backend.store.database import Store
from trainer_backend.store.tables import Consumed, Curve, Iteration, Metric, MetricRow, SyncedFile
from trainer_backend.store.writing import job_number

Row = Mapping[str, Any]
# Bytes before the place that was read up to: equal ones say that the file is the one it was, only longer.
_TAIL = 256
# Ids that one question names: a database refuses one of tens of thousands.
_AT_ONCE = 500


@dataclass(frozen=True, slots=True)
class Known:
    """A row of synced_files."""

    number: int
    size: int
    modified_ns: int
    digest: str | None
    decisions: bool


@dataclass(frozen=True, slots=True)
class NewLines:
    """What a file has that the store has not.

    Attributes:
        whole: these are all lines there are: the file is new here, or was written anew.
        end: the byte that the next lines will begin at; `digest` is of those before it.
    """

    rows: Sequence[Row]
    whole: bool
    end: int
    digest: str
    modified_ns: int


# Called with a connection, the number of the job, and the new lines.
Put = Callable[[Connection, int, NewLines], None]


def sync_lines(store: Store, job_id: str, path: Path, known: Mapping[str, Known], put: Put) -> bool:
    """Bring the lines of a file that are new into the store, by `put`; whether there were any."""
    if _unchanged(path, known.get(path.name)):
        return False
    with store.writing() as connection:
        job = job_number(connection, job_id, lock=True)
        found = _synced(connection, job, path.name)  # anew: another sync may have been quicker
        new = _new_lines(path, found)
        if new is None:
            return False
        put(connection, job, new)
        _remember(connection, job, path.name, found, new)
    return bool(new.rows) or new.whole


def _unchanged(path: Path, known: Known | None) -> bool:
    try:
        facts = path.stat()
    except FileNotFoundError:
        return known is None
    return known is not None and (facts.st_size, facts.st_mtime_ns) == (known.size, known.modified_ns)


def _new_lines(path: Path, known: Known | None) -> NewLines | None:
    """None: nothing is there, and nothing was."""
    try:
        with path.open("rb") as file:  # one opening: of a file that is replaced meanwhile, all or nothing
            modified_ns = os.fstat(file.fileno()).st_mtime_ns
            data, begin, seen = _read_on(file, known)
    except FileNotFoundError:
        return None if known is None else NewLines((), True, 0, _digest(b""), 0)
    except OSError as error:
        raise RunDirectoryError(f"{path} cannot be read: {error}") from error
    end = data.rfind(b"\n") + 1
    rows = tuple(_rows(data[seen:end]))
    return NewLines(rows, begin + seen == 0, begin + end, _digest(data[:end]), modified_ns)


def _read_on(file: BinaryIO, known: Known | None) -> tuple[bytes, int, int]:
    """Bytes of the file, where they begin in it, and how many of them were read before."""
    if known is not None:
        begin = max(0, known.size - _TAIL)
        file.seek(begin)
        data = file.read()
        seen = known.size - begin
        if len(data) >= seen and _digest(data[:seen]) == known.digest:
            return data, begin, seen
        file.seek(0)
    return file.read(), 0, 0


def _rows(data: bytes) -> Iterator[Row]:
    """As every reader of these files does, without a line that a crash cut short."""
    return (row for line in data.split(b"\n") if (row := object_of(line)) is not None)


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data[-_TAIL:], digest_size=12).hexdigest()


def _synced(connection: Connection, job: int, name: str) -> Known | None:
    table = SyncedFile
    query = select(table.number, table.size, table.modified_ns, table.digest, table.decisions)
    row = connection.execute(query.where(table.job == job, table.name == name)).first()
    return None if row is None else Known(*row)


def _remember(connection: Connection, job: int, name: str, known: Known | None, new: NewLines) -> None:
    if known is not None:
        connection.execute(delete(SyncedFile).where(SyncedFile.number == known.number))
    connection.execute(
        insert(SyncedFile).values(
            job=job, name=name, size=new.end, modified_ns=new.modified_ns, digest=new.digest, decisions=False
        )
    )


def put_metrics(connection: Connection, job: int, new: NewLines) -> None:
    """Rows of metrics; of two rows of one kind and iteration the later one stands."""
    rows = {(str(row.get("kind", "")), int(row.get("iteration", 0))): row for row in new.rows}
    gone, added = _difference(connection, job, rows) if new.whole else (rows.keys(), rows)
    _forget(connection, job, gone)
    if not added:
        return
    lines = [
        {"job": job, "kind": kind, "iteration": iteration, "row": row}
        for (kind, iteration), row in added.items()
    ]
    connection.execute(insert(MetricRow), lines)
    _put_points(connection, job, added)
    finished = datetime.fromtimestamp(new.modified_ns / 1e9, UTC)
    ended = [
        {
            "job": job,
            "iteration": iteration,
            "policy_version": row.get("policy/version"),
            "finished": finished,
        }
        for (kind, iteration), row in added.items()
        if kind == "iteration"
    ]
    if ended:
        connection.execute(insert(Iteration), ended)


def _difference(
    connection: Connection, job: int, rows: Mapping[tuple[str, int], Row]
) -> tuple[Iterable[tuple[str, int]], dict[tuple[str, int], Row]]:
    """Return the store's rows that the file lacks, and the reverse. Equal rows stay, with their numbers."""
    query = select(MetricRow.kind, MetricRow.iteration, MetricRow.row).where(MetricRow.job == job)
    stored = {(found.kind, found.iteration): found.row for found in connection.execute(query)}
    gone = [key for key, row in stored.items() if rows.get(key) != row]
    return gone, {key: row for key, row in rows.items() if stored.get(key) != row}


def _forget(connection: Connection, job: int, keys: Iterable[tuple[str, int]]) -> None:
    for kind, iteration in keys:
        of_row = (MetricRow.job == job, MetricRow.kind == kind, MetricRow.iteration == iteration)
        if not connection.execute(delete(MetricRow).where(*of_row)).rowcount:
            continue
        curves = select(Curve.number).where(Curve.job == job, Curve.kind == kind)
        connection.execute(delete(Metric).where(Metric.curve.in_(curves), Metric.iteration == iteration))
        if kind == "iteration":
            ended = (Iteration.job == job, Iteration.iteration == iteration)
            connection.execute(delete(Iteration).where(*ended))


def _put_points(connection: Connection, job: int, rows: Mapping[tuple[str, int], Row]) -> None:
    points = [
        (kind, name, iteration, value)
        for (kind, iteration), row in rows.items()
        for name, value in numbers_of(row)
    ]
    curves = _curves(connection, job, {(kind, name) for kind, name, *_ in points})
    if points:
        connection.execute(
            insert(Metric),
            [
                {"curve": curves[kind, name], "iteration": iteration, "value": value}
                for kind, name, iteration, value in points
            ],
        )


def _curves(connection: Connection, job: int, wanted: set[tuple[str, str]]) -> dict[tuple[str, str], int]:
    query = select(Curve.kind, Curve.name, Curve.number).where(Curve.job == job)
    found = {(row.kind, row.name): row.number for row in connection.execute(query)}
    new = sorted(wanted - found.keys())
    if new:
        values = [{"job": job, "kind": kind, "name": name} for kind, name in new]
        added = connection.execute(insert(Curve).returning(Curve.kind, Curve.name, Curve.number), values)
        found |= {(row.kind, row.name): row.number for row in added}
    return found


def numbers_of(row: Row) -> Iterator[tuple[str, float]]:
    """Return the finite numbers of a row by name, in a dict as `name/key`; lists and texts are skipped."""
    for name, value in row.items():
        if isinstance(value, dict):
            yield from ((f"{name}/{key}", number) for key, number in numbers_of(value))
        elif isinstance(value, int | float) and name not in ("kind", "iteration") and math.isfinite(value):
            yield name, float(value)


def put_ledger(connection: Connection, job: int, new: NewLines) -> None:
    """What updates learned from.

    Raises:
        RunDirectoryError: a planned rollout stands there twice, which the trainer refuses to write.
    """
    if new.whole:
        connection.execute(delete(Consumed).where(Consumed.job == job))
    values = [
        {
            "job": job,
            "planned": planned_id(rollout_id),
            "rollout_id": rollout_id,
            "iteration": int(row.get("iteration", 0)),
        }
        for row in new.rows
        for rollout_id in row.get("rollout_ids", ())
    ]
    _refuse_twice(connection, job, values)
    if values:
        connection.execute(insert(Consumed), values)


def _refuse_twice(connection: Connection, job: int, values: Sequence[Mapping[str, Any]]) -> None:
    seen: dict[str, int] = {}
    for value in values:
        if value["planned"] in seen:
            raise learned_twice(value["planned"], seen[value["planned"]], value["iteration"])
        seen[value["planned"]] = value["iteration"]
    ids = list(seen)
    for first in range(0, len(ids), _AT_ONCE):
        mine = (Consumed.job == job, Consumed.planned.in_(ids[first : first + _AT_ONCE]))
        stored = connection.execute(select(Consumed.planned, Consumed.iteration).where(*mine)).first()
        if stored is not None:
            raise learned_twice(stored.planned, stored.iteration, seen[stored.planned])
