"""`turnwise backup` and `turnwise restore`: save and restore a service's jobs and runs as one archive.

The archive is a tar file. Its file `jobs.jsonl` contains the rows of the jobs, and its folder `runs/` the run
directories, from which the rest of the store is rebuilt. A backup reads the jobs first and then the runs,
because a job that was read after its run might refer to files that the archive lacks. If a run changes after
its job was read, the next sync updates the job.
"""

import json
import os
import shutil
import tarfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from io import BytesIO
from pathlib import Path, PurePosixPath
from typing import IO, Any
from uuid import uuid4

from trainer_backend.errors import JobError, RunDirectoryError
from trainer_backend.jobs.data_dir import SERVICE, DataDir, open_data_dir
from trainer_backend.rundir import lock
from trainer_backend.rundir.files import NO_LINKS, write_errors
from trainer_backend.rundir.layout import OWNERS_ALONE
from trainer_backend.store.database import open_store
from trainer_backend.store.jobs import put_rows, read_rows

JOBS, RUNS = "jobs.jsonl", "runs"
# Temporary content of a run directory, in addition to *.tmp.
_LEFT_OUT = frozenset({lock.FILE})
_OF_FILES = 0o600
# Prefix of folders with a backup's links, and the age in seconds at which an abandoned one is deleted.
_LINKS, _LEFT_S = "backup-", 86_400.0


def back_up(data_dir: Path, database_url: str, archive: IO[bytes]) -> tuple[int, int]:
    """Write the archive; return the numbers of jobs and of run directories. A service may be running.

    Raises:
        RunDirectoryError: the data directory does not exist, or a run cannot be read.
        StoreError: the store cannot be read.
    """
    if not data_dir.is_dir():
        raise RunDirectoryError(f"there is no data directory {data_dir}", hint="Name it with --data-dir.")
    with open_data_dir(data_dir, runs_jobs=False) as data, closing(open_store(database_url)) as store:
        rows = read_rows(store, data.home)
        for row in rows:
            if row["run_dir"] is not None:
                row["run_dir"] = os.path.relpath(row["run_dir"], data.path)
        with _linked(data) as folder, tarfile.open(fileobj=archive, mode="w|", encoding="utf-8") as tar:
            text = "".join(json.dumps(row, sort_keys=True) + "\n" for row in rows).encode()
            _add(tar, JOBS, BytesIO(text), len(text), 0.0)
            runs = sorted(path.relative_to(data.path) for path in data.runs())
            for path in sorted(folder.rglob("*")):
                if path.is_file():
                    with path.open("rb") as file:
                        found = os.fstat(file.fileno())
                        name = f"{RUNS}/{path.relative_to(folder).as_posix()}"
                        _add(tar, name, file, found.st_size, found.st_mtime)
    return len(rows), len(runs)


def restore(data_dir: Path, database_url: str, archive: IO[bytes]) -> tuple[int, int]:
    """Restore an archive, wholly or not at all; return the numbers of jobs and of run directories.

    Raises:
        RunDirectoryError: the data directory contains runs, or a service runs jobs in it.
        JobError: the archive is not a complete backup, or the store already contains one of its jobs.
    """
    with open_data_dir(data_dir, runs_jobs=True) as data:
        if there := data.runs():
            raise RunDirectoryError(
                f"{data.path} holds runs, such as {there[0].name}; a backup is restored into an empty folder",
                hint="Name another --data-dir, or move them away.",
            )
        aside = data.path / SERVICE / f"restored-{uuid4().hex}"
        try:
            rows = _extract(archive, aside)
            for row in rows:
                if row["run_dir"] is not None:
                    row["run_dir"] = str((data.path / row["run_dir"]).resolve())
            with closing(open_store(database_url)) as store:
                count = put_rows(store, rows, data.home, finish=lambda: _move_runs(aside / RUNS, data))
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    return len(rows), count


@contextmanager
def _linked(data: DataDir) -> Iterator[Path]:
    """Yield a temporary folder with hard links to, or copies of, all current files of the runs.

    If a run replaces or deletes a file, the folder keeps the old one. If a file grows, its link grows too.
    """
    folder = data.path / SERVICE / f"{_LINKS}{uuid4().hex}"
    for left in (data.path / SERVICE).glob(f"{_LINKS}*"):  # from killed backups
        if time.time() - left.stat().st_mtime > _LEFT_S:
            shutil.rmtree(left, ignore_errors=True)
    try:
        for run in data.runs():
            if not (folder / run.relative_to(data.path)).exists():  # a run inside another is linked already
                _link(run, folder / run.relative_to(data.path))
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _link(source: Path, target: Path) -> None:
    with write_errors(target):
        target.mkdir(OWNERS_ALONE, parents=True)
        # Checkpoints first: metrics may be newer than the checkpoints, as after a kill, but not older.
        for entry in sorted(os.scandir(source), key=lambda one: one.name):
            if entry.is_dir(follow_symlinks=False):
                _link(Path(entry.path), target / entry.name)
            elif entry.name in _LEFT_OUT or entry.name.endswith(".tmp"):
                continue
            elif entry.is_file(follow_symlinks=False):
                with suppress(FileNotFoundError):  # retention deleted it
                    try:
                        os.link(entry.path, target / entry.name)
                    except OSError as error:
                        if error.errno not in NO_LINKS:
                            raise
                        shutil.copy2(entry.path, target / entry.name)


def _add(tar: tarfile.TarFile, name: str, content: IO[bytes], size: int, modified_s: float) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mtime, entry.mode = size, modified_s, _OF_FILES
    tar.addfile(entry, content)


def _extract(archive: IO[bytes], folder: Path) -> list[dict[str, Any]]:
    """Write the runs of an archive into a new folder; return the rows of the archived jobs."""
    rows: list[dict[str, Any]] | None = None
    with write_errors(folder):
        folder.mkdir(OWNERS_ALONE)
        (folder / RUNS).mkdir(OWNERS_ALONE)
    try:
        with tarfile.open(fileobj=archive, mode="r|*", encoding="utf-8") as tar:
            for entry in tar:
                source = tar.extractfile(entry) if entry.isreg() else None
                if source is None:
                    continue
                path = PurePosixPath(entry.name)
                if entry.name == JOBS:
                    rows = [json.loads(line) for line in source.read().splitlines()]
                elif path.is_absolute() or ".." in path.parts or path.parts[:1] != (RUNS,):
                    raise ValueError(f"{entry.name!r} is no path below {RUNS}/")
                else:
                    _write(source, folder / path, entry.mtime)
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise JobError(f"this is no archive of `turnwise backup`, or only a part of one: {error}") from error
    if rows is None:
        raise JobError(f"this is no archive of `turnwise backup`: it has no {JOBS}")
    return rows


def _write(source: IO[bytes], target: Path, modified_s: float) -> None:
    with write_errors(target):
        target.parent.mkdir(OWNERS_ALONE, parents=True, exist_ok=True)
        with open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, _OF_FILES), "wb") as file:
            shutil.copyfileobj(source, file)
        os.utime(target, (modified_s, modified_s))


def _move_runs(folder: Path, data: DataDir) -> int:
    for path in sorted(folder.iterdir()):
        with write_errors(path):
            path.rename(data.path / path.name)
    return len(data.runs())
