"""Where an error of the disk becomes an error of ours."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer_backend.errors import RunNotWritten


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
