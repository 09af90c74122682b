"""A file of records that survives the process: one line a record, each with its own checksum.

    1f2e3d4c {"format": 1, "kind": "env", ...}
    99aabbcc {"op": "step", ...}

A record is handed to the operating system before anybody is told of what it says, so a killed process loses
none that was told. A machine that loses its power may lose the last seconds: nothing is fsynced. A last line
that was cut short was never told, and is cut off.
"""

import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import structlog

from task_app.errors import JournalDamaged

FORMAT = 2
SUFFIX = ".journal"

log = structlog.get_logger("task_app")

Record = Mapping[str, Any]


class JournalFile:
    """Appends to one file, or replaces it as a whole; `size` is what it had after the last write.

    The file is opened for every write: thousands of sessions would be thousands of open files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.size = 0

    def append(self, records: Iterable[Record]) -> None:
        """Write these behind the others, all or none; a part of them is taken back.

        Raises:
            OSError: the disk is full or gone.
        """
        text = b"".join(map(_line, records))
        with open(self.path, "ab", buffering=0, opener=_existing) as file:
            before = os.fstat(file.fileno()).st_size
            if file.write(text) != len(text):
                os.ftruncate(file.fileno(), before)
                raise OSError("only a part could be written")
        self.size = before + len(text)

    def replace(self, records: Iterable[Record]) -> None:
        """Let the file hold these alone; a crash on the way leaves the old one.

        Raises:
            OSError: the disk is full or gone.
        """
        text = b"".join(map(_line, records))
        aside = self.path.with_suffix(".tmp")
        try:
            with open(aside, "wb", buffering=0, opener=_private) as file:
                if file.write(text) != len(text):
                    raise OSError("only a part could be written")
            os.replace(aside, self.path)
        except OSError:
            # It would take up what little room there is.
            with suppress(OSError):
                aside.unlink(missing_ok=True)
            raise
        self.size = len(text)

    def remove(self) -> None:
        """The file is not needed any more."""
        try:
            self.path.unlink(missing_ok=True)
        except OSError as exc:
            # It would come back to life at the next start, so it must not go unnoticed.
            log.error("journal_not_removed", file=self.path.name, reason=str(exc))


def read_records(path: Path, *, kind: str) -> Iterator[dict[str, Any]]:
    """The records of a file, its first line's head among them; a torn last line is cut off, and logged.

    Raises:
        JournalDamaged: another format or kind, a changed line, or nothing whole at all. What came before a
            changed line has been given out by then.
    """
    whole = number = 0
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            record = _record(line, number)
            if number == 1:
                _check_head(record, kind=kind)
            yield record
            whole += len(line)
    if whole == 0:
        raise JournalDamaged("it holds no whole line")
    cut = path.stat().st_size - whole
    if cut:
        log.warning("journal_torn", file=path.name, line=number, cut_bytes=cut)
        os.truncate(path, whole)


def _check_head(head: Record, *, kind: str) -> None:
    if head.get("format") != FORMAT:
        raise JournalDamaged(f"it has format {head.get('format')!r}; this task app reads {FORMAT}")
    if head.get("kind") != kind:
        raise JournalDamaged(f"it is a journal of {head.get('kind')!r}, expected {kind!r}")


def _line(record: Record) -> bytes:
    text = json.dumps(record, allow_nan=False, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _record(line: bytes, number: int) -> dict[str, Any]:
    checksum, _, text = line[:-1].partition(b" ")
    record = json.loads(text) if checksum == b"%08x" % zlib.crc32(text) else None
    if not isinstance(record, dict):
        raise JournalDamaged(f"line {number} was changed after it was written")
    return record


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def _existing(path: str, flags: int) -> int:
    """Never a file without a head: one that is gone stays gone."""
    return os.open(path, flags & ~os.O_CREAT)
