"""One trainer a run directory: a lock that dies with the process which holds it, however that ends."""

import fcntl
import json
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer_backend.errors import RunDirectoryError
from trainer_backend.rundir.files import now, writing

FILE = "lock"
# Who looks whether a run is being trained holds its lock for a moment (`holder`).
_TRIES, _PAUSE_S = 20, 0.05


@dataclass(frozen=True, slots=True)
class Holder:
    """Who trains a run.

    Attributes:
        pid: its process, on `host`; 0: it has just begun, and has not said.
        since: UTC, ISO 8601.
    """

    pid: int
    host: str
    since: str

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}, since {self.since}" if self.pid else "another process"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Be the only one who trains in this run directory.

    Raises:
        RunDirectoryError: somebody else is; or the directory cannot be written.
    """
    path = folder / FILE
    with writing(path):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with writing(path):  # a file system may have no locks
            taken = _taken(descriptor)
        if not taken:
            raise _by(_said(path), folder)
        with writing(path):
            os.ftruncate(descriptor, 0)
            os.write(
                descriptor, json.dumps(asdict(Holder(os.getpid(), socket.gethostname(), now()))).encode()
            )
        yield
    finally:
        # The file stays: whoever waits for it has it open already, and would hold the lock of a removed one.
        os.close(descriptor)


def refuse_taken(folder: Path) -> None:
    """Refuse a run directory in which another process trains, before anything in it is opened.

    Raises:
        RunDirectoryError: somebody does.
    """
    found = holder(folder)
    if found is not None:
        raise _by(found, folder)


def holder(folder: Path) -> Holder | None:
    """Who trains this run now; None: nobody."""
    path = folder / FILE
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _said(path)
    except OSError:
        return None  # a file system without locks, where nobody can hold one
    finally:
        os.close(descriptor)
    return None


def _by(found: Holder, folder: Path) -> RunDirectoryError:
    return RunDirectoryError(
        f"{folder} is being trained by {found}; two trainers would overwrite one another",
        hint="Wait for it, stop it, or choose another run directory.",
    )


def _taken(descriptor: int) -> bool:
    for number in range(_TRIES):
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if number + 1 < _TRIES:
                time.sleep(_PAUSE_S)
        else:
            return True
    return False


def _said(path: Path) -> Holder:
    try:
        return Holder(**json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return Holder(0, "", "")
