"""Copy the new and changed parts of a run directory into the store; repeating a copy changes nothing.

The run directory is the truth: rows leave the store when their files are gone.
"""

from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from sqlalchemy import delete, insert, select

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.checkpoint_paths import best_checkpoint, whole_checkpoints
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import LEDGER_FILE
from trainer_backend.store.database import Store
from trainer_backend.store.rows import CheckpointRow
from trainer_backend.store.sync_lines import MARK, FileMark, put_ledger, put_metrics, sync_lines
from trainer_backend.store.sync_rollouts import sync_rollouts
from trainer_backend.store.tables import Checkpoint, SyncedFile, job_number


def sync_run(store: Store, job_id: str, directory: RunDirectory, *, tidies: bool = True) -> bool:
    """Copy a run directory into the store, and apply [retention] to both; return whether anything was new.

    Each file has a transaction of its own: after an interruption the next sync does the rest. A file that
    cannot be read does not hold up the others. `tidies`: old files are deleted, which a service that
    only shows runs leaves.
    """
    with store.read() as connection:
        query = select(SyncedFile.name, *MARK).where(SyncedFile.job == job_number(connection, job_id))
        marks = {name: FileMark(*mark) for name, *mark in connection.execute(query)}
    parts: list[Callable[[], bool]] = [
        lambda: sync_rollouts(store, job_id, directory.path, marks, tidies=tidies),
        lambda: sync_lines(store, job_id, directory.metrics_file, marks, put_metrics),
        lambda: sync_lines(store, job_id, directory.path / LEDGER_FILE, marks, put_ledger),
        lambda: sync_checkpoints(store, job_id, directory.checkpoints),
    ]
    changed, problems = False, []
    for part in parts:
        try:
            changed = part() or changed
        except RunDirectoryError as error:
            problems.append(error)
    if problems:
        raise problems[0]
    return changed


def sync_checkpoints(store: Store, job_id: str, folder: Path) -> bool:
    """Update the store's list of checkpoints; return whether it changed."""
    best = best_checkpoint(folder)
    folders = whole_checkpoints(folder)
    with store.read() as connection:
        job = job_number(connection, job_id)
        query = select(Checkpoint.folder, Checkpoint.best).where(Checkpoint.job == job)
        stored = {row.folder: row.best for row in connection.execute(query)}
    if stored == {path.name: path == best for _, path in folders}:
        return False
    rows = [{"job": job, **asdict(row)} for row in checkpoint_rows(folder)]
    with store.write() as connection:
        job_number(connection, job_id, lock=True)
        connection.execute(delete(Checkpoint).where(Checkpoint.job == job))
        if rows:
            connection.execute(insert(Checkpoint), rows)
    return True


def checkpoint_rows(folder: Path) -> list[CheckpointRow]:
    """List the whole checkpoints, oldest first."""
    best = best_checkpoint(folder)
    return [
        CheckpointRow(path.name, iteration, path == best, _size(path))
        for iteration, path in whole_checkpoints(folder)
    ]


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except FileNotFoundError:
            continue  # the run is deleting it; the next sync sees that
    return total
