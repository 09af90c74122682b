"""Checkpoint folders in the store: their names, sizes, and which one is the best."""

from dataclasses import asdict
from pathlib import Path

from sqlalchemy import delete, insert, select

from trainer_backend.rundir.checkpoint_paths import best_checkpoint, whole_checkpoints
from trainer_backend.store.database import Store
from trainer_backend.store.job_numbers import job_number
from trainer_backend.store.rows import CheckpointRow
from trainer_backend.store.tables import Checkpoint


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
