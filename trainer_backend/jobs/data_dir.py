"""The folder that a trainer service works in: its run directories, its owner, and the deletion of runs."""

import asyncio
import fcntl
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import structlog
import tomli

from trainer_backend.errors import RunDirectoryError
from trainer_backend.job.load import parse_job
from trainer_backend.jobs.states import refuse_found
from trainer_backend.rundir import lock
from trainer_backend.rundir.files import writing
from trainer_backend.rundir.layout import OWNERS_ALONE, RunDirectory, create_run, open_run
from trainer_backend.rundir.lock import holder, locked
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store
from trainer_backend.store.jobs import refuse_unended
from trainer_backend.store.rows import JobRow

_SERVICE = ".service"
# A run directory that holds it was deleted as a job, and its files were kept: it is not found again.
FORGOTTEN = "forgotten"
# How far below the data directory runs lie: `turnwise train --seeds` makes NAME-seeds/seed_0.
_DEPTHS = ("*/run.json", "*/*/run.json")
# What `create_run` has made when it is killed: the file that makes it a run, run.json, is written last.
_BEGUN_FILES = frozenset({lock.FILE, "job.toml"})
_BEGUN_FOLDERS = frozenset({"rollouts", "checkpoints"})
# In the service's own folder: a run directory that is being removed.
_DELETED = "deleted-"


@dataclass(frozen=True, slots=True)
class DataDir:
    """
    Attributes:
        path: absolute, without links: what lies below it can be told from what does not.
        home: names this folder in a store that several services share.
    """

    path: Path
    home: str

    def new_run_dir(self, name: str) -> Path:
        """Where a new job's run is to be; not made yet. Nobody else is given the same."""
        return self.path / f"{name}-{uuid4().hex[:8]}"

    def run_of(self, job: JobRow) -> RunDirectory:
        """The run of a posted job, made if the job has none yet; what a kill left half made is made whole.

        Raises:
            JobError: this version cannot read the job.
            RunDirectoryError: its run is gone, or lies elsewhere, or cannot be written.
        """
        config = parse_job(tomli.loads(job.config), where=f"job {job.id}").config
        assert job.run_dir is not None, "a posted job is created with its run directory"
        path = Path(job.run_dir)
        if self._outside(path):
            raise RunDirectoryError(
                f"the run directory of job {job.id}, {path}, is not below the data directory {self.path}",
                hint="A moved data directory is put back, or each run goes on by `turnwise train --resume`.",
            )
        if (path / "run.json").exists():
            return open_run(path)
        if job.run_id is not None:
            raise RunDirectoryError(
                f"job {job.id} trained in {path}, and its run is not there any more (no run.json)",
                hint="Put the run directory back and resume the job, or post it anew.",
            )
        _refuse_to_overwrite(path)
        return create_run(config, path)

    def runs(self) -> list[Path]:
        """Every run directory in here that was not forgotten."""
        found = [file.parent for pattern in _DEPTHS for file in self.path.glob(pattern)]
        ours = self.path / _SERVICE
        return sorted(
            path for path in found if not (path.is_relative_to(ours) or (path / FORGOTTEN).exists())
        )

    def forget(self, path: Path) -> None:
        """Keep the files of a run, and let `runs` pass over them."""
        with writing(path):
            (path / FORGOTTEN).touch()

    def refuse_foreign(self, path: Path) -> None:
        """
        Raises:
            RunDirectoryError: it is no run directory below this folder, so nothing of it is deleted.
        """
        if self._outside(path) or path.is_symlink() or not (path / "job.toml").exists():
            raise RunDirectoryError(f"{path} is no run directory in {self.path}, so it is not deleted")

    def move_aside(self, path: Path) -> Path:
        """Where a run directory that is to be removed has been moved, as a whole; `aside` names it."""
        aside = self.path / _SERVICE / f"{_DELETED}{uuid4().hex}"
        with writing(path):
            return path.rename(aside)

    def aside(self) -> list[Path]:
        """List the folders that were moved aside and are not removed yet."""
        return sorted((self.path / _SERVICE).glob(f"{_DELETED}*"))

    def _outside(self, path: Path) -> bool:
        found = path.resolve()
        return found == self.path or not found.is_relative_to(self.path)


def _refuse_to_overwrite(path: Path) -> None:
    """
    Raises:
        RunDirectoryError: there is more in this folder than a kill in `create_run` leaves.
    """
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        begun = entry.name in _BEGUN_FILES or entry.suffix == ".tmp"  # of a file that was being written
        if begun or (entry.name in _BEGUN_FOLDERS and not any(entry.iterdir())):
            continue
        raise RunDirectoryError(
            f"{path} holds {entry.name!r} and no run.json, so it is no run, and it is not overwritten",
            hint="Restore its run.json, or move it away, and resume the job.",
        )


@contextmanager
def open_data_dir(path: Path, *, runs_jobs: bool) -> Iterator[DataDir]:
    """Make the folder, or use it again; one service at a time runs jobs in it.

    Args:
        runs_jobs: False for a service that only shows runs; any number of such services may share the folder.

    Raises:
        RunDirectoryError: it cannot be written, another service runs jobs in it, or it is a copy.
    """
    folder = path.resolve()
    with writing(folder):
        for made in (folder, folder / _SERVICE):
            made.mkdir(OWNERS_ALONE, parents=True, exist_ok=True)
        descriptor = os.open(folder / _SERVICE / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if runs_jobs and not _locked(descriptor):
            raise RunDirectoryError(
                f"another trainer service runs jobs in {path}",
                hint="Stop it, choose another --data-dir, or start this one with --no-jobs.",
            )
        home = _home_of(folder / _SERVICE / "home")
        if runs_jobs:
            _claim_place(folder, home)
        yield DataDir(folder, home)
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _home_of(file: Path) -> str:
    """Return the folder's own name; the first service that opens the folder makes it."""
    with writing(file), file.open("a+", encoding="utf-8") as home:
        fcntl.flock(home, fcntl.LOCK_EX)
        home.seek(0)
        name = home.read().strip()
        if not name:
            name = uuid4().hex
            home.write(name)
        return name


def _claim_place(folder: Path, home: str) -> None:
    """Note where this folder lies. One that was copied has the name of the other: on a store that both share
    each would take the other's jobs.

    Raises:
        RunDirectoryError: the folder that it is a copy of is still there.
    """
    ours, note = folder / _SERVICE / "home", folder / _SERVICE / "place"
    with writing(note):
        before = Path(note.read_text(encoding="utf-8").strip()) if note.exists() else folder
        other = before / _SERVICE / "home"
        copied = before != folder and other.exists() and not other.samefile(ours)
        if copied and other.read_text(encoding="utf-8").strip() == home:
            raise RunDirectoryError(
                f"{folder} is a copy of {before}, which is still there: one name of a service, twice",
                hint=f"Delete {ours} to make it a service of its own, or remove the other.",
            )
        note.write_text(f"{folder}\n", encoding="utf-8")


# Deletion moves a run's files aside as a whole and removes them later: a kill leaves all of them or none.

log = structlog.get_logger("trainer")

# The sweeper also looks this often, for folders that an abandoned request has moved aside.
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
    """Remove the folders that were moved aside, also those that a killed service left. Runs on a thread."""
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
