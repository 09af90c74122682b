"""The lock of a run directory, which admits one trainer and ends with its process.

The package `filelock` is no substitute: its locks are exclusive, and `holder` needs a shared one. Version 3
empties the file that names the holder at each try; version 4 may use a file that outlives a killed process.
"""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import now, write_errors

FILE = "lock"
# `holder` takes the lock for a moment in order to look, so a trainer tries several times.
_TRIES, _PAUSE_S = 20, 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that trains a run."""

    pid: int
    """The process on `host`; 0: it has just started and has not written this yet."""
    host: str
    since: str
    """UTC, ISO 8601."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "another process"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory as its only trainer."""
    path = folder / FILE
    with write_errors(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with write_errors(path):  # a file system may have no locks
            acquired = _acquire(descriptor)
        if not acquired:
            raise _lock_error(_read_holder(path), folder)
        with write_errors(path):
            os.ftruncate(descriptor, 0)
            os.write(
                descriptor, json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), now()))).encode()
            )
        yield
    finally:
        # The file stays: a waiting process has it open already, and would then lock a deleted file.
        os.close(descriptor)


def refuse_if_locked(folder: Path) -> None:
    """Refuse a run directory in which another process trains, before opening anything in it."""
    current = holder(folder)
    if current is not None:
        raise _lock_error(current, folder)


def holder(folder: Path) -> Holder | None:
    """Return the process that trains this run now, or None."""
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _read_holder(path)
    except OSError:
        return None  # a file system without locks has no holder
    finally:
        os.close(descriptor)
    return None


def _lock_error(current: Holder, folder: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"{folder} is being trained by {current}; two trainers would overwrite one another",
        hint="Wait for it, stop it, or choose another run directory.",
    )


def _acquire(descriptor: int) -> bool:
    for _ in range(_TRIES):
        with suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        time.sleep(_PAUSE_S)
    return False


def _read_holder(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Holder(0, "", "")
