"""Files of a run on disk: JSON lines that grow at their end, and files that are whole or absent."""

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from trainer_backend.errors import RunNotWritten


def append_line(path: Path, row: Mapping[str, Any], *, durable: bool) -> None:
    """Add one line, all of it or nothing.

    Args:
        durable: it is on disk before this returns; else a power cut may lose it, a kill of the process not.

    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    append_text(path, json.dumps(row, allow_nan=False, sort_keys=True), durable=durable)


def append_text(path: Path, line: str, *, durable: bool) -> None:
    """As `append_line`, of an object that is JSON already."""
    data = f"{line}\n".encode()
    with writing(path), path.open("a+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        try:
            # What a killed process left of its last line must not swallow this one.
            _write(file, b"\n" + data if _is_cut_short(file, end) else data)
        except OSError:
            file.truncate(end)
            raise
        if durable:
            os.fsync(file.fileno())
            if end == 0:
                flush(path.parent)  # a file that this line has made: its name is to stay too


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of the whole lines, see `read_texts`; what is no JSON object is left out."""
    return [row for line in read_texts(path) if (row := object_of(line)) is not None]


def each_line(path: Path) -> Iterator[dict[str, Any]]:
    """As `read_lines`, one at a time: a long file is never in memory as a whole."""
    if path.exists():
        with path.open("rb") as file:
            for line in file:
                if line.endswith(b"\n") and (row := object_of(line)) is not None:
                    yield row


def read_texts(path: Path) -> list[bytes]:
    """The whole lines; none of a file that is not there.

    Raises:
        OSError: the file is there and cannot be read.
    """
    try:
        return path.read_bytes().split(b"\n")[:-1]
    except FileNotFoundError:
        return []


def replace_lines(path: Path, rows: Iterable[Mapping[str, Any]], *, durable: bool) -> None:
    """Write a file of lines anew, whole or not at all; `durable` as `append_line`.

    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    lines = (json.dumps(row, allow_nan=False, sort_keys=True) + "\n" for row in rows)
    replace_text(path, "".join(lines), durable=durable)


def object_of(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object of a line; None if it is not one."""
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _is_cut_short(file: BinaryIO, end: int) -> bool:
    if end == 0:
        return False
    file.seek(end - 1)
    return file.read(1) != b"\n"


def _write(file: BinaryIO, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[file.write(rest) :]


# A whole file survives kills and power cuts: written aside, flushed, renamed, and its folder flushed too.


@contextmanager
def replaced(path: Path, *also: type[Exception], durable: bool = True) -> Iterator[Path]:
    """The file to write inside, which becomes `path` when that is done.

    Args:
        also: as `boundary.writing`.
        durable: it is on disk before this returns; else a power cut may leave an empty file under that name,
            a kill of the process not.

    Raises:
        RunNotWritten: the disk is full, or refuses; what was there before is untouched.
    """
    with writing(path, *also):
        aside = path.with_name(f".{path.name}.tmp")
        yield aside
        if durable:
            flush(aside)  # a rename may reach the disk before what is in the file
        os.replace(aside, path)
        if durable:
            flush(path.parent)


def replace_text(path: Path, text: str, *, durable: bool = True) -> None:
    """As `replaced`, of a text."""
    with replaced(path, durable=durable) as aside:
        aside.write_text(text, encoding="utf-8")


def flush(path: Path) -> None:
    """A file is on disk after this; of a folder the names in it.

    Raises:
        OSError: the disk is full, or refuses.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Whatever is written inside, to `path`, or a sentence that names it.

    Args:
        path: the file or folder.
        also: error classes of a library that stand for a full disk, beside OSError.

    Raises:
        RunNotWritten: the disk is full, or refuses.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        of_run = any((folder / "run.json").exists() for folder in path.parents)
        going_on = " With space or permission, the run goes on with --resume." if of_run else ""
        raise RunNotWritten(
            f"{path} cannot be written: {error}", hint=f"What was there before is untouched.{going_on}"
        ) from error


# Wall-clock times are stored only to be shown; no decision depends on them.


def now() -> str:
    """UTC, ISO 8601, in milliseconds."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
