"""Where an error of the disk becomes an error of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_backend.errors import RunDirectoryError


@contextmanager
def writing(path: Path, *also: type[Exception]) -> Iterator[None]:
    """Whatever is written inside, to `path`, or a sentence that names it.

    Args:
        path: the file or folder.
        also: error classes of a library that stand for a full disk, beside OSError.

    Raises:
        RunDirectoryError: the disk is full, or refuses.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        raise RunDirectoryError(
            f"{path} cannot be written: {error}",
            hint="What was there before is untouched; with space or permission, a run goes on with --resume.",
        ) from error
