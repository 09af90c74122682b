"""`turnwise new env NAME`: a folder with an environment that works, its tests and a job that trains on it."""

import keyword
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from string import Template

from trainer_backend.errors import JobError
from trainer_backend.rundir.boundary import writing

# What each file of the folder is made from.
FILES = {
    "{name}_environment.py": "environment.py.template",
    "plugins.py": "plugins.py.template",
    "test_{name}.py": "test.py.template",
    "job.toml": "job.toml.template",
}


def write_environment(name: str, parent: Path) -> list[Path]:
    """Write the folder `parent/name`.

    Returns:
        The files, in the order in which one would read them.

    Raises:
        JobError: the name is no Python name, or the folder is there already.
        RunDirectoryError: it cannot be written.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]{0,59}", name) or keyword.iskeyword(name):
        raise JobError(
            f"turnwise new env: {name!r} is no name for an environment; allowed are small letters, digits "
            f"and _, a letter first{_meant(name)}"
        )
    folder = parent / name
    with writing(folder):
        try:
            folder.mkdir(parents=True)
        except FileExistsError as error:
            raise JobError(f"turnwise new env: {folder} is there already; nothing was written") from error
        return [_written(folder / file, text) for file, text in _texts(name)]


def _texts(name: str) -> Iterator[tuple[str, str]]:
    words = name.split("_")
    names = {
        "name": name,
        "Class": "".join(map(str.capitalize, words)),
        "title": " ".join(words).capitalize(),
    }
    for file, template in FILES.items():
        text = files("trainer_backend.new_environment").joinpath(template).read_text(encoding="utf-8")
        yield file.format(name=name), Template(text).substitute(names)


def _written(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8")
    return path


def _meant(name: str) -> str:
    close = re.sub(r"\W+", "_", name.lower()).strip("_0123456789")
    return f". Did you mean {close!r}?" if close and close != name and not keyword.iskeyword(close) else ""
