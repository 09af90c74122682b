"""Deleting a job: its row, and where that is wanted its files. These are moved aside as a whole, and removed
while nobody waits; a kill in between leaves a run that is whole, or one that the next start removes."""

import asyncio
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import structlog

from trainer_backend.rundir.lock import holder, locked
from trainer_backend.store import jobs
from trainer_backend.store.database import Store
from trainer_backend.store.errors import JobConflict
from trainer_backend.store.rows import JobRow
from trainer_backend.store.states import refuse_unended
from trainer_backend.supervising.asked import refuse_found
from trainer_backend.supervising.data_dir import DataDir

log = structlog.get_logger("trainer")

# What a request that was given up has still moved aside is found then.
_LOOK_S = 60.0


def forget_job(store: Store, data: DataDir, job: JobRow, *, files: bool) -> None:
    """Forget a job; its run directory stays and is not found again, or is moved aside to be removed.

    A run of `turnwise train` is forgotten only once its directory is gone.

    Raises:
        JobConflict: it has not ended, somebody trains in its run directory, or that is of `turnwise train`.
        RunDirectoryError: its files are not this service's to delete; nothing is changed then.
        StoreUnavailable: the database does not answer; its files are where they were.
    """
    refuse_unended(job)
    path = None if job.run_dir is None else Path(job.run_dir)
    if path is None or not path.is_dir():
        jobs.remove(store, job.id)
        return
    refuse_found(job, "delete")
    if files:
        data.refuse_foreign(path)
    with _held(job, path):
        data.forget(path)  # first: a run that is neither a job nor forgotten would be found again
        if not files:
            jobs.remove(store, job.id)
            return
        aside = data.move_aside(path)
        try:
            jobs.remove(store, job.id)
        except BaseException:
            aside.rename(path)
            raise


@contextmanager
def _held(job: JobRow, path: Path) -> Iterator[None]:
    """Nobody begins to train there meanwhile, and nothing that was moved aside is removed yet."""
    found = holder(path)
    if found is not None:
        raise JobConflict(f"job {job.id} is being trained by {found}; stop it first, then delete it")
    with locked(path):
        yield


def sweep(data: DataDir) -> None:
    """Remove what was moved aside, also by a service that was killed over it. On a thread."""
    for path in data.aside():
        if holder(path) is not None:  # its row is being deleted, and that may fail
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("files_not_deleted", path=str(path), detail=str(error))


class Sweeper:
    """Of one event loop; `run` it until it is cancelled."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._thread = ThreadPoolExecutor(1, "sweeper")
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Something was moved aside."""
        self._wake.set()

    async def run(self) -> None:
        try:
            while True:
                self._wake.clear()
                await asyncio.get_running_loop().run_in_executor(self._thread, sweep, self._data)
                with suppress(TimeoutError):
                    async with asyncio.timeout(_LOOK_S):
                        await self._wake.wait()
        finally:
            self._thread.shutdown(wait=False)  # the next start goes on with what takes long
