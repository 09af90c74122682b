"""Updates the store's index of a run directory. Repeating a sync changes nothing.

The files of the run directory are authoritative: when a file is gone, its rows are removed from the store.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from operator import itemgetter
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, delete, insert, select, update

from trainer_backend.core.policies import name_player
from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.rollout_index import RolloutFile, read_index, rollout_files
from trainer_backend.store.database import Store
from trainer_backend.store.metrics import METRICS_FILE, Mark, summarise
from trainer_backend.store.reads import MARK
from trainer_backend.store.retention import read_retention, remove_old_files
from trainer_backend.store.tables import COUNTED, JOBS, ROLLOUTS, SYNCED_FILES, job_number

# Rollouts per transaction. Other writers wait until the transaction ends.
_AT_ONCE = 2_000

Seen = Mapping[str, tuple[int, int]]  # size and modification time of an indexed file, by its name


def sync_run(store: Store, job_id: str, directory: RunDirectory, *, tidies: bool = True) -> bool:
    """Index a run directory, and apply [retention] to it; return whether the index has changed.

    The next sync completes one that was interrupted. If a file is unreadable, the other files are indexed
    before RunDirectoryError is raised. `tidies` says whether to delete old files; a service that only shows
    runs keeps them.
    """
    with store.read() as connection:
        query = select(SYNCED_FILES.c.name, SYNCED_FILES.c.size, SYNCED_FILES.c.modified_ns)
        rows = connection.execute(query.where(SYNCED_FILES.c.job == job_number(connection, job_id)))
        seen = {name: (size, modified_ns) for name, size, modified_ns in rows}
    parts: tuple[Callable[[], bool], ...] = (
        lambda: _sync_rollouts(store, job_id, directory.path, seen, tidies=tidies),
        lambda: _sync_metrics(store, job_id, directory.path, seen),
    )
    changed, problems = False, []
    for part in parts:
        try:
            changed = part() or changed
        except RunDirectoryError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return changed


def _sync_metrics(store: Store, job_id: str, run: Path, seen: Seen) -> bool:
    """Store the `Mark` of metrics.jsonl, and values of its metrics for the list of runs."""
    try:
        facts = (run / METRICS_FILE).stat()
        if seen.get(METRICS_FILE) == (facts.st_size, facts.st_mtime_ns):
            return False  # without opening the file, since there may be hundreds of old runs
    except FileNotFoundError:
        if METRICS_FILE not in seen:
            return False
    with store.metrics.open(str(run)):
        pass  # read before the transaction, which must not wait for the disk
    with store.write() as connection:
        job = job_number(connection, job_id, lock=True)
        mine = (SYNCED_FILES.c.job == job, SYNCED_FILES.c.name == METRICS_FILE)
        # Read again: a concurrent sync may have finished first.
        row = connection.execute(select(*MARK).where(*mine)).first()
        before = Mark() if row is None else Mark(*row)
        iteration = connection.scalar(select(JOBS.c.iteration).where(JOBS.c.number == job))
        with store.metrics.open(str(run)) as file:
            mark, summary = file.next_mark(before), summarise(file)
            if summary["iteration"] != iteration:  # an iteration has ended at the last write of the file
                ended = datetime.fromtimestamp(file.modified_ns / 1e9, UTC)
                summary["finished"] = ended if summary["iteration"] else None
            seen_now = {"job": job, "name": METRICS_FILE, "modified_ns": file.modified_ns, **asdict(mark)}
        connection.execute(delete(SYNCED_FILES).where(*mine))
        connection.execute(insert(SYNCED_FILES).values(seen_now))
        connection.execute(update(JOBS).where(JOBS.c.number == job).values(summary))
    return mark != before


def _sync_rollouts(store: Store, job_id: str, run: Path, seen: Seen, *, tidies: bool) -> bool:
    """Index new and changed rollout files, and remove the rows of deleted files.

    If `tidies`, the files that [retention] does not keep are deleted first.
    """
    retention = read_retention(run)
    files = rollout_files(run)
    if tidies:
        files = remove_old_files(retention, files)
    names = {file.name for file in files}
    stale = [name for name in seen if name != METRICS_FILE and name not in names]
    if stale:
        with store.write() as connection:
            _remove(connection, job_number(connection, job_id, lock=True), stale)
    changed, problems = bool(stale), []
    batch: list[tuple[RolloutFile, list[dict[str, Any]]]] = []
    for file in files:
        if seen.get(file.name) == (file.size, file.modified_ns):
            continue
        try:
            batch.append((file, read_index(file.path)))
        except FileNotFoundError:
            continue  # deleted just now: the next sync removes its rows
        except RunDirectoryError as error:
            problems.append(error)
        if sum(len(rows) for _, rows in batch) >= _AT_ONCE:
            _put(store, job_id, batch)
            changed, batch = True, []
    if batch:
        _put(store, job_id, batch)
        changed = True
    if problems:
        raise problems[0]
    return changed


def _put(store: Store, job_id: str, files: Sequence[tuple[RolloutFile, list[dict[str, Any]]]]) -> None:
    """Replace the stored rows of some files; each file comes with its new rows."""
    with store.write() as connection:
        job = job_number(connection, job_id, lock=True)
        _remove(connection, job, [file.name for file, _ in files])
        indexed = [(file, [_rollout_values(file, row) for row in rows]) for file, rows in files]
        marks = [
            {"job": job, "name": file.name, "size": file.size, "modified_ns": file.modified_ns}
            | {"digest": None, "base": 0, "rows": len(rows), "counts": _count_combinations(rows)}
            for file, rows in indexed
        ]
        numbers = connection.scalars(
            insert(SYNCED_FILES).returning(SYNCED_FILES.c.number, sort_by_parameter_order=True), marks
        ).all()
        values = [
            {"job": job, "file": number, "place": place, **row}
            for number, (_, rows) in zip(numbers, indexed, strict=True)
            for place, row in enumerate(rows)
        ]
        if values:
            connection.execute(insert(ROLLOUTS), values)


def _rollout_values(file: RolloutFile, row: dict[str, Any]) -> dict[str, Any]:
    row |= {"stage": file.stage, "iteration": file.iteration, "decisions": row.pop("decision_count") or 0}
    row["policy"] = name_player(row.pop("model"), row.pop("policy_name") or "")
    return row


def _count_combinations(rows: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[*values, count] for values, count in Counter(map(itemgetter(*COUNTED), rows)).items()]


def _remove(connection: Connection, job: int, names: Sequence[str]) -> None:
    connection.execute(delete(SYNCED_FILES).where(SYNCED_FILES.c.job == job, SYNCED_FILES.c.name.in_(names)))
