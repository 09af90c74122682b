"""The folder that a trainer service works in: its run directories, and whose folder it is."""

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from trainer_backend.errors import RunDirectoryError
from trainer_backend.jobfile.schema import JobConfig
from trainer_backend.rundir.boundary import writing
from trainer_backend.rundir.layout import RunDirectory, create_run, open_run

_SERVICE = ".service"
# A run directory that holds it was deleted as a job, and its files were kept: it is not found again.
FORGOTTEN = "forgotten"
# How far below the data directory runs lie: `turnwise train --seeds` makes NAME-seeds/seed_0.
_DEPTHS = ("*/run.json", "*/*/run.json")


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

    def run_for(self, path: Path, config: JobConfig) -> RunDirectory:
        """The run of a job, made if it is not there; what a kill left half made is made anew.

        Raises:
            RunDirectoryError: it cannot be written, or holds something else.
        """
        if (path / "run.json").exists():
            return open_run(path)
        with writing(path):
            if path.exists():  # ours by its name, and without the file that is written last
                shutil.rmtree(path)
        return create_run(config, path)

    def runs(self) -> list[Path]:
        """Every run directory in here that was not forgotten."""
        found = [file.parent for pattern in _DEPTHS for file in self.path.glob(pattern)]
        return sorted(path for path in found if not (path / FORGOTTEN).exists())

    def forget(self, path: Path) -> None:
        """Keep the files of a run, and let `runs` pass over them."""
        if path.is_dir():
            with writing(path):
                (path / FORGOTTEN).touch()

    def remove(self, path: Path) -> None:
        """Delete a run directory with all that it holds.

        Raises:
            RunDirectoryError: it is no run directory below this folder, or does not let itself be deleted.
        """
        if not path.exists():
            return
        inside = path.resolve().is_relative_to(self.path) and not path.is_symlink()
        if not inside or path.resolve() == self.path or not (path / "job.toml").exists():
            raise RunDirectoryError(f"{path} is no run directory in {self.path}, so it is not deleted")
        with writing(path):
            shutil.rmtree(path)


@contextmanager
def open_data_dir(path: Path, *, runs_jobs: bool) -> Iterator[DataDir]:
    """Make the folder, or use it again; one service at a time runs jobs in it.

    Args:
        runs_jobs: False for a service that only shows what is there: any number of those may.

    Raises:
        RunDirectoryError: it cannot be written, or another service runs jobs in it.
    """
    folder = path.resolve()
    with writing(folder):
        (folder / _SERVICE).mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / _SERVICE / "lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        if runs_jobs and not _locked(descriptor):
            raise RunDirectoryError(
                f"another trainer service runs jobs in {path}",
                hint="Stop it, choose another --data-dir, or start this one with --no-jobs.",
            )
        yield DataDir(folder, _home_of(folder / _SERVICE / "home"))
    finally:
        os.close(descriptor)


def _locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _home_of(file: Path) -> str:
    """The folder's own name, made once, by whoever comes first."""
    with writing(file), file.open("a+", encoding="utf-8") as home:
        fcntl.flock(home, fcntl.LOCK_EX)
        home.seek(0)
        name = home.read().strip()
        if not name:
            name = uuid4().hex
            home.write(name)
        return name
