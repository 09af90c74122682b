"""The data directory of a trainer service: its run directories, its owner, and the deletion of runs."""

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

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.job.load import parse_job
from trainer_backend.jobs.states import refuse_external
from trainer_backend.rundir import lock
from trainer_backend.rundir.files import write_errors
from trainer_backend.rundir.layout import OWNERS_ALONE, RunDirectory, create_run, open_run
from trainer_backend.rundir.lock import holder, run_lock
from trainer_backend.store import jobs
from trainer_backend.store.database import JobConflict, Store
from trainer_backend.store.jobs import refuse_unended
from trainer_backend.store.rows import Job

SERVICE = ".service"
# Marks a run directory whose job was deleted without its files; the watcher ignores the directory.
FORGOTTEN = "forgotten"
# Depths of runs below the data directory: `turnwise train --seeds` makes NAME-seeds/seed_0.
_DEPTHS = ("*/run.json", "*/*/run.json")
# What a killed `create_run` leaves; run.json, which makes a folder a run, is written last.
_PARTIAL_FILES = frozenset({lock.FILE, "job.toml"})
_PARTIAL_FOLDERS = frozenset({"rollouts", "checkpoints"})
# Prefix of deleted run directories in the service's own folder.
_TRASH = "deleted-"


@dataclass(frozen=True, slots=True)
class DataDir:
    path: Path
    """Absolute, with symbolic links resolved, so that paths can be compared."""
    home: str
    """A random name that marks the jobs of this data directory in a store that several services share."""
    plugins: tuple[Path, ...] = ()
    """The only files that jobs may name in `job.trainer_plugins`."""

    def new_run_dir(self, name: str) -> Path:
        """Return a unique path for a new job's run; the folder is not created yet."""
        return self.path / f"{name}-{uuid4().hex[:8]}"

    def prepare_run(self, job: Job) -> RunDirectory:
        """Return the run of a posted job; create its directory if it is missing or incomplete."""
        stored = tomli.loads(job.config)
        stored.get("job", {}).pop("trainer_plugins_sha256", None)  # a new run uses the current files
        config = parse_job(stored, where=f"job {job.id}", runs_plugins=False).config
        if withdrawn := set(config.job.trainer_plugins) - set(self.plugins):
            raise JobError(
                f"job {job.id} was posted when the service had {min(map(str, withdrawn))}, and it has "
                "it no more",
                hint="Start it with that --plugins again and resume the job, or post it again.",
            )
        assert job.run_dir is not None, "a posted job is created with its run directory"
        path = Path(job.run_dir)
        if self.is_outside(path):
            raise RunDirectoryError(
                f"the run directory of job {job.id}, {path}, is not below the data directory {self.path}",
                hint="Put the data directory back, or continue each run with `turnwise train --resume`.",
            )
        if (path / "run.json").exists():
            return open_run(path)
        if job.run_id is not None:
            raise RunDirectoryError(
                f"job {job.id} trained in {path}, and its run is not there any more (no run.json)",
                hint="Put the run directory back and resume the job, or post it again.",
            )
        _refuse_to_overwrite(path)
        return create_run(config, path)

    def runs(self) -> list[Path]:
        """Return all run directories, except those whose job was deleted without its files."""
        paths = [file.parent for pattern in _DEPTHS for file in self.path.glob(pattern)]
        ours = self.path / SERVICE
        return sorted(
            path for path in paths if not (path.is_relative_to(ours) or (path / FORGOTTEN).exists())
        )

    def aside(self) -> list[Path]:
        return sorted((self.path / SERVICE).glob(f"{_TRASH}*"))

    def is_outside(self, path: Path) -> bool:
        real = path.resolve()
        return real == self.path or not real.is_relative_to(self.path)


def _refuse_to_overwrite(path: Path) -> None:
    """Raise RunDirectoryError if a folder contains anything but what an interrupted `create_run` leaves."""
    for entry in sorted(path.iterdir()) if path.is_dir() else ():
        partial = entry.name in _PARTIAL_FILES or entry.suffix == ".tmp"  # a file that was being written
        if partial or (entry.name in _PARTIAL_FOLDERS and not any(entry.iterdir())):
            continue
        raise RunDirectoryError(
            f"{path} holds {entry.name!r} and no run.json, so it is no run, and it is not overwritten",
            hint="Restore its run.json, or move it away, and resume the job.",
        )


def say_unusable(path: Path, *, writes: bool) -> str | None:
    """Return a sentence with the owner and mode of a path that this process cannot use, otherwise None."""
    needed = os.R_OK | (os.W_OK if writes else 0) | (os.X_OK if path.is_dir() else 0)
    if not os.access(path, os.F_OK) or os.access(path, needed, effective_ids=True):
        return None
    found = path.stat()
    return (
        f"{path} belongs to user {found.st_uid}, with mode {found.st_mode & 0o777:o}, and user "
        f"{os.geteuid()}, who runs this service, cannot {'read and write' if writes else 'read'} it"
    )


@contextmanager
def open_data_dir(path: Path, *, runs_jobs: bool, plugins: tuple[Path, ...] = ()) -> Iterator[DataDir]:
    """Open the data directory, or create it.

    Only one service at a time may run jobs in it. Any number of other services may show its runs.
    """
    folder = path.resolve()
    # Files may belong to root, as after `compose cp`. Only the run folders and their JSON files are checked.
    with suppress(PermissionError):  # from the glob of an unreadable folder, which the loop reports
        for part in (folder, folder / SERVICE, *folder.glob("*/"), *folder.glob("*/*.json")):
            if reason := say_unusable(part, writes=runs_jobs):
                hint = f"As root: chown -R {os.geteuid()}:{os.getegid()} {folder}"
                raise RunDirectoryError(reason, hint=hint)
    with write_errors(folder):
        for subfolder in (folder, folder / SERVICE):
            subfolder.mkdir(OWNERS_ALONE, parents=True, exist_ok=True)
        lock = (folder / SERVICE / "lock").open("ab")
    with lock:
        try:
            if runs_jobs:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise RunDirectoryError(
                f"another trainer service runs jobs in {path}",
                hint="Stop it, choose another --data-dir, or start this one with --no-jobs.",
            ) from error
        home = _read_home(folder / SERVICE / "home")
        if runs_jobs:
            _claim_place(folder, home)
        yield DataDir(folder, home, plugins)


def _read_home(file: Path) -> str:
    """Return the data directory's random name; create the name when the directory is first opened."""
    with write_errors(file), file.open("a+", encoding="utf-8") as home:
        fcntl.flock(home, fcntl.LOCK_EX)
        home.seek(0)
        name = home.read().strip()
        if not name:
            name = uuid4().hex
            home.write(name)
        return name


def _claim_place(folder: Path, home: str) -> None:
    """Record the path of a data directory; raise RunDirectoryError if it is a copy of another one.

    A copy has the same name as the original. If both used one store, each service would run the other's jobs.
    """
    ours, note = folder / SERVICE / "home", folder / SERVICE / "place"
    with write_errors(note):
        before = Path(note.read_text(encoding="utf-8").strip()) if note.exists() else folder
        other = before / SERVICE / "home"
        is_copy = before != folder and other.exists() and not other.samefile(ours)
        if is_copy and other.read_text(encoding="utf-8").strip() == home:
            raise RunDirectoryError(
                f"{folder} is a copy of {before}, which is still there: one name of a service, twice",
                hint=f"Delete {ours} to make it a service of its own, or remove the other.",
            )
        note.write_text(f"{folder}\n", encoding="utf-8")


# A deletion first moves the files to the trash in one step: a kill leaves all of them or none in place.

log = structlog.get_logger("trainer")

# Seconds between two sweeps. They find folders that a request moved to the trash after it had timed out.
_LOOK_S = 60.0


def forget_job(store: Store, data: DataDir, job: Job, *, files: bool) -> None:
    """Remove an ended or paused job from the store.

    With `files`, the run directory is moved to the trash. Without, it is marked, so that the watcher ignores
    it. Raises JobConflict for a run of `turnwise train` whose directory still exists.
    """
    refuse_unended(job)
    path = None if job.run_dir is None else Path(job.run_dir)
    if path is None or not path.is_dir():
        jobs.remove(store, job.id)
        return
    refuse_external(job, "delete")
    if files and (data.is_outside(path) or path.is_symlink() or not (path / "job.toml").exists()):
        raise RunDirectoryError(f"{path} is no run directory in {data.path}, so it is not deleted")
    if (trainer := holder(path)) is not None:
        raise JobConflict(f"job {job.id} is being trained by {trainer}; stop it first, then delete it")
    with run_lock(path):  # so that no other process trains in it or deletes it
        with write_errors(path):
            (path / FORGOTTEN).touch()  # first: otherwise the watcher would find the run again
        if not files:
            jobs.remove(store, job.id)
            return
        with write_errors(path):
            aside = path.rename(data.path / SERVICE / f"{_TRASH}{uuid4().hex}")
        try:
            jobs.remove(store, job.id)
        except BaseException:
            aside.rename(path)
            raise


def sweep(data: DataDir) -> None:
    """Delete the folders in the trash, including those that a killed service left. Call it on a thread."""
    for path in data.aside():
        if holder(path) is not None:  # `forget_job` is removing its job, and moves it back on failure
            continue
        try:
            shutil.rmtree(path)
        except OSError as error:
            log.warning("files_not_deleted", path=str(path), detail=str(error))


class Sweeper:
    """Deletes the run directories in the trash. Start `run` as a task, and cancel the task at the end."""

    def __init__(self, data: DataDir) -> None:
        self._data = data
        self._thread = ThreadPoolExecutor(1, "sweeper")
        self._wake = asyncio.Event()

    def wake(self) -> None:
        """Let `run` sweep now, because a folder was moved to the trash."""
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
            self._thread.shutdown(wait=False)  # the next start finishes long deletions
