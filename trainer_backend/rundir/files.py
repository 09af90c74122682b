"""Reads and writes files of a run: JSON lines, which are appended, and files that are replaced atomically."""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from trainer_backend.errors import RunNotWritten

# Errors of a disk without hard or symbolic links.
NO_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.EMLINK, errno.ENOSYS})


def append_line(path: Path, row: Mapping[str, Any], *, durable: bool) -> None:
    """Append a whole line or nothing. The line survives a kill, and a power cut too if `durable` is true."""
    append_text(path, json.dumps(row, allow_nan=False, sort_keys=True), durable=durable)


def append_text(path: Path, line: str, *, durable: bool) -> None:
    """Append a line of JSON; see `append_line`."""
    data = f"{line}\n".encode()
    with write_errors(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            file.seek(max(end - 1, 0))
            # If a kill cut the last line short, end that line first.
            rest = memoryview(data if file.read(1) in (b"", b"\n") else b"\n" + data)
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(end)
            raise
        if durable:
            os.fsync(file.fileno())
            if end == 0:
                flush(path.parent)  # a new file: its name must survive too


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of all whole lines. Lines that are not JSON objects are skipped."""
    return [row for line in read_texts(path) if (row := parse_object(line)) is not None]


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of `read_lines` one at a time, without holding a long file in memory."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (row := parse_object(line)) is not None:
                    yield row


def read_texts(path: Path) -> list[bytes]:
    """Read all whole lines; return an empty list if the file is missing."""
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def replace_lines(path: Path, rows: Iterable[Mapping[str, Any]], *, durable: bool) -> None:
    """Replace a file of JSON lines atomically. `durable` means the same as in `append_line`."""
    lines = (json.dumps(row, allow_nan=False, sort_keys=True) + "\n" for row in rows)
    replace_text(path, "".join(lines), durable=durable)


def parse_object(line: bytes) -> dict[str, Any] | None:
    """Parse a line as a JSON object; return None if it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


@contextmanager
def replacement(path: Path, *also: type[Exception], durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path, and rename it to `path` at the end of the context.

    `path` is whole after a kill, and after a power cut too if `durable` is true. `also`: see `write_errors`.
    """
    with write_errors(path, *also):
        aside = path.with_name(f".{path.name}.tmp")
        yield aside
        if durable:
            flush(aside)  # otherwise the rename may reach the disk before the content
        os.replace(aside, path)
        if durable:
            flush(path.parent)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    with replacement(path, durable=durable) as aside:
        aside.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """Flush a file's content, or the names of a folder's files, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def write_errors(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Raise RunNotWritten with the path if a write inside the context fails.

    Args:
        also: exceptions by which a library reports that a write failed, in addition to OSError.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        of_run = any((folder / "run.json").exists() for folder in path.parents)
        hint = " With space or permission, the run goes on with --resume." if of_run else ""
        raise RunNotWritten(
            f"{path} cannot be written: {error}", hint=f"What was there before is untouched.{hint}"
        ) from error


def now() -> str:
    """Return the time for display: UTC, ISO 8601, with milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
