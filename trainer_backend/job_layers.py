"""Several TOML files as one job: later ones go over earlier ones, key by key, and each key knows its file."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from trainer_backend.errors import JobError

# Keys of which a job has one: a later file or --set that gives one of them takes the others away.
ALTERNATIVES: dict[str, frozenset[str]] = {"model": frozenset({"preset", "path", "name"})}


@dataclass(frozen=True, slots=True)
class Files:
    """The files of a job, and which of them a key comes from.

    Attributes:
        names: in the order in which they were given.
        owners: the file that a key's value stands in, by dotted key; not of tables.
    """

    names: Sequence[str]
    owners: Mapping[str, str] = field(default_factory=dict)

    def of(self, *dotted: str) -> str:
        """The file or files of a key or table, joined by " + "; all of them where none has it."""
        return self._named(key for key in self.owners if any(is_in(key, wanted) for wanted in dotted))

    def of_sentence(self, sentence: str) -> str:
        """The files of the keys that a sentence names."""
        return self._named(key for key in self.owners if key in sentence)

    def _named(self, keys: Iterator[str]) -> str:
        found = {self.owners[key] for key in keys} or set(self.names)
        return " + ".join(name for name in dict.fromkeys(self.names) if name in found)


def read_layers(paths: Sequence[Path]) -> tuple[dict[str, Any], Files]:
    """Read files left to right into one document.

    Tables are joined key by key, to any depth; every other value, a list too, replaces the one before.

    Raises:
        JobError: no file, one that cannot be read, bad TOML.
    """
    if not paths:
        raise JobError("a job needs at least one TOML file")
    document: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for path in paths:
        layer = _read(path)
        for table, key in _chosen(layer):
            for other in make_way(document, table, key):
                owners.pop(f"{table}.{other}", None)
        _lay_over(document, layer, owners, file=str(path), inside="")
    return document, Files([str(path) for path in paths], owners)


def make_way(document: dict[str, Any], table: str, key: str) -> set[str]:
    """Take the alternatives of a key that is about to be set out of the document; those that were there."""
    found = document.get(table)
    if key not in ALTERNATIVES.get(table, ()) or not isinstance(found, dict):
        return set()
    others = found.keys() & ALTERNATIVES[table] - {key}
    for other in others:
        del found[other]
    return others


def is_in(key: str, table: str) -> bool:
    """Whether `key` is `table`, or stands below it."""
    return f"{key}.".startswith(f"{table}.")


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomli.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise JobError(f"{path}: no such file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from error
    except tomli.TOMLDecodeError as error:
        raise JobError(f"{path}: not valid TOML: {error}") from error


def _chosen(layer: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Table and key of the alternatives that a layer gives one of; two of them are left to be refused."""
    for table, keys in ALTERNATIVES.items():
        given = keys & layer[table].keys() if isinstance(layer.get(table), dict) else set()
        if len(given) == 1:
            yield table, *given


def _lay_over(
    document: dict[str, Any], layer: Mapping[str, Any], owners: dict[str, str], *, file: str, inside: str
) -> None:
    for key, value in layer.items():
        dotted = f"{inside}{key}"
        if isinstance(value, dict) and isinstance(document.setdefault(key, {}), dict):
            _lay_over(document[key], value, owners, file=file, inside=f"{dotted}.")
            continue
        for below in [known for known in owners if is_in(known, dotted)]:
            del owners[below]
        document[key] = value
        owners[dotted] = file
