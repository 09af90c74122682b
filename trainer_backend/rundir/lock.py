"""The lock of a run directory. One process at a time can hold it; it is released when the process ends.

The package `filelock` does not fit: its locks are exclusive, and `holder` needs a shared one. Its version 3
empties the lock file, which names the holder, at each try. Its version 4 may use a file that stays after a
kill.
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
# `holder` takes the lock for a moment to see whether it is free, so a trainer tries several times.
_TRIES, _PAUSE_S = 20, 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """The process that trains a run."""

    pid: int
    """Process id on `host`; 0 if the process has just taken the lock and has not written this yet."""
    host: str
    since: str
    """When the process took the lock; UTC, ISO 8601."""

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "another process"


@contextmanager
def run_lock(folder: Path) -> Iterator[None]:
    """Hold the lock of a run directory. Raise RunDirectoryError if another process holds it."""
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
        # The file is not deleted: a waiting process has it open already, and would lock a deleted file.
        os.close(descriptor)


def refuse_if_locked(folder: Path) -> None:
    """Raise RunDirectoryError if another process trains this run now. Changes nothing."""
    current = holder(folder)
    if current is not None:
        raise _lock_error(current, folder)


def holder(folder: Path) -> Holder | None:
    """Return the process that trains this run now; None if there is none, or locks are not supported."""
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
