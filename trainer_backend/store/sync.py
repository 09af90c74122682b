"""Copy the new and changed parts of a run directory into the store; repeating a copy changes nothing.

The run directory is the truth: rows leave the store when their files are gone.
"""

from collections.abc import Callable

from sqlalchemy import Connection, select

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import LEDGER_FILE
from trainer_backend.store.database import Store
from trainer_backend.store.job_numbers import job_number
from trainer_backend.store.sync_checkpoints import sync_checkpoints
from trainer_backend.store.sync_lines import FileMark, put_ledger, put_metrics, sync_lines
from trainer_backend.store.sync_rollouts import sync_rollouts
from trainer_backend.store.tables import SyncedFile


def sync_run(store: Store, job_id: str, directory: RunDirectory, *, tidies: bool = True) -> bool:
    """Copy a run directory into the store, and apply [retention] to both.

    Each file has a transaction of its own: after an interruption the next sync does the rest. A file that
    cannot be read does not hold up the others.

    Args:
        tidies: whether to delete old files; False for a service that only shows runs.

    Returns:
        Whether anything was new.
    """
    with store.read() as connection:
        job = job_number(connection, job_id)
        marks = _file_marks(connection, job)
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


def _file_marks(connection: Connection, job: int) -> dict[str, FileMark]:
    """Read how far each file was copied, by name."""
    table = SyncedFile
    columns = (table.name, table.number, table.size, table.modified_ns, table.digest, table.decisions)
    rows = connection.execute(select(*columns).where(table.job == job))
    return {row.name: FileMark(*row[1:]) for row in rows}
