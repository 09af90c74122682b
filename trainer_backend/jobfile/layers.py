"""Several TOML files as one job: later ones go over earlier ones, key by key, and each key knows its file.

A relative path in a file is one from the file's folder, where it leads somewhere; otherwise, as with --set,
one from the working directory.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli

from trainer_backend.errors import JobError

REWARD_KEYS = (
    "step_rewards_enabled",
    "step_rewards_mode",
    "event_rewards_kind",
    "step_rewards_beta",
    "step_rewards_indicator_lambda",
    "step_rewards_horizon",
)
# The published homes of a step-reward switch (DESIGN.md 4.15).
REWARD_HOMES = ("training", "training.rewards", "rollout")
# Keys of which a job has one: a later file or --set that gives one of them takes the others away.
ALTERNATIVES = (
    ("model.preset", "model.path", "model.name"),
    ("rollout_only.model_path", "rollout_only.inference_url"),
    *(tuple(f"{home}.{key}" for home in REWARD_HOMES) for key in REWARD_KEYS),
)
# Keys that hold a path, or a list of paths, that must be there before a run.
PATHS = (
    "model.path",
    "rollout_only.model_path",
    "services.task_plugins",
    "data.path",
    "data.evaluation_path",
    "multi_turn.interaction_config_path",
)


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


def read_layers(paths: Sequence[Path], *, anchored: bool = True) -> tuple[dict[str, Any], Files]:
    """Read files left to right into one document.

    Tables are joined key by key, to any depth; every other value, a list too, replaces the one before.

    Args:
        anchored: paths in a file are seen from its folder; False leaves them as they are written.

    Raises:
        JobError: no file, one that cannot be read, bad TOML.
    """
    if not paths:
        raise JobError("a job needs at least one TOML file")
    document: dict[str, Any] = {}
    owners: dict[str, str] = {}
    for path in paths:
        layer = _read(path)
        if anchored:
            anchor(layer, path.parent)
        for gone in make_way(document, layer):
            owners.pop(gone, None)
        _lay_over(document, layer, owners, file=str(path), inside="")
    return document, Files([str(path) for path in paths], owners)


def make_way(document: dict[str, Any], layer: Mapping[str, Any]) -> list[str]:
    """Take out of the document what a layer that is about to go over it gives alternatives of.

    Returns:
        The keys that were there, dotted.
    """
    gone = []
    for keys in ALTERNATIVES:
        given = {dotted for dotted in keys if _home_of(layer, dotted) is not None}
        for dotted in keys if given else ():
            home = None if dotted in given else _home_of(document, dotted)
            if home is not None:
                del home[dotted.rpartition(".")[2]]
                gone.append(dotted)
    return gone


def anchor(document: Mapping[str, Any], folder: Path) -> None:
    """Make each relative path of PATHS that is there, seen from a folder, an absolute one."""
    for dotted in PATHS:
        table, _, key = dotted.partition(".")
        found = document.get(table)
        for home in found if isinstance(found, list) else [found]:  # [[table]] is a list of them
            if not isinstance(home, dict) or key not in home:
                continue
            if isinstance(home[key], list):
                home[key] = [_anchored(value, folder) for value in home[key]]
            else:
                home[key] = _anchored(home[key], folder)


def _anchored(value: Any, folder: Path) -> Any:
    """A path that leads nowhere stays as it was typed: it is told so, and a later place may have it."""
    if not isinstance(value, str) or not value or not os.path.exists(folder / value):
        return value
    return os.path.abspath(folder / value)  # not resolved: a link may be moved to another model


def _home_of(document: Mapping[str, Any], dotted: str) -> dict[str, Any] | None:
    """The table that holds a key, if one does."""
    *tables, key = dotted.split(".")
    found: Any = document
    for table in tables:
        found = found.get(table) if isinstance(found, dict) else None
    return found if isinstance(found, dict) and key in found else None


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
