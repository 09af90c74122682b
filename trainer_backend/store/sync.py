"""From a run directory into the store: what is not there yet, and what was written anew. Idempotent.

The run directory is the truth: what it no longer holds leaves the store too.
"""

from collections.abc import Callable

from sqlalchemy import Connection, select

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.layout import RunDirectory
from trainer_backend.rundir.spool import LEDGER_FILE
from trainer_backend.store.database import Store
from trainer_backend.store.sync_checkpoints import sync_checkpoints
from trainer_backend.store.sync_lines import Known, put_ledger, put_metrics, sync_lines
from trainer_backend.store.sync_rollouts import sync_rollouts
from trainer_backend.store.tables import SyncedFile
from trainer_backend.store.writing import job_number


def sync_run(store: Store, job_id: str, directory: RunDirectory, *, tidies: bool = True) -> bool:
    """Bring the store to what the run directory holds, and both to what [retention] says.

    Each file is a transaction of its own: one that is cut short has done a part, and the next does the rest.
    A file that cannot be read holds up no other.

    Args:
        tidies: False for who only shows what is there: no file is removed.

    Returns:
        Whether anything was new.

    Raises:
        UnknownJob: there is no such job.
        StoreUnavailable: the database does not answer, or is full.
        RunDirectoryError: a file cannot be read; the others are in.
    """
    with store.reading() as connection:
        job = job_number(connection, job_id)
        known = _known(connection, job)
    parts: list[Callable[[], bool]] = [
        lambda: sync_rollouts(store, job_id, directory.path, known, tidies=tidies),
        lambda: sync_lines(store, job_id, directory.metrics_file, known, put_metrics),
        lambda: sync_lines(store, job_id, directory.path / LEDGER_FILE, known, put_ledger),
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


def _known(connection: Connection, job: int) -> dict[str, Known]:
    """By name, how far each file was read."""
    table = SyncedFile
    columns = (table.name, table.number, table.size, table.modified_ns, table.digest, table.decisions)
    found = connection.execute(select(*columns).where(table.job == job))
    return {row.name: Known(*row[1:]) for row in found}
