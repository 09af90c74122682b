"""Files that are whole or not there, after a kill and after a power cut: written aside, flushed to the disk,
renamed, and the folder that holds the names flushed too."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_backend.rundir.boundary import writing


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
