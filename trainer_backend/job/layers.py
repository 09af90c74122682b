"""Layers of a job: several TOML files and `--set table.key=value`, merged key by key.

A later layer replaces keys of an earlier one, and each value knows the place it came from.

A relative path in a file starts at the file's folder if something is there; otherwise, as with --set, it
starts at the working directory.
"""

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tomli
import tomli_w

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
class Layer:
    """The tables of a file, or of one `--set`, and the place that an error names for them.

    A place holds no value of --set: it may be a key, and a place is shown.
    """

    place: str
    tables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Places:
    """Where the keys of a job come from.

    Attributes:
        files: in the order in which they were given.
        owners: the place of each value, by dotted key; of tables only the empty ones.
    """

    files: Sequence[str]
    owners: Mapping[str, str] = field(default_factory=dict)

    def of(self, *keys: str) -> str:
        """The places of a key or table, or of the table that lacks the key; of nothing, all files."""
        places: dict[str, None] = {}
        while not places and any(keys):
            places = dict.fromkeys(
                place
                for known, place in self.owners.items()
                if any(_is_in(known, key) or _is_in(key, known) for key in keys)
            )
            keys = tuple(key.rpartition(".")[0] for key in keys)
        return self._join(places or self.files)

    def of_sentence(self, sentence: str) -> str:
        """The places of the keys that a sentence names, which contradict each other; a file is among them."""
        places = [place for key, place in self.owners.items() if key in sentence]
        return self._join(places if set(places) & set(self.files) else [*self.files, *places])

    def _join(self, places: Iterable[str]) -> str:
        """Join the files in their order, then the overrides."""
        given = dict.fromkeys(places)
        files = " + ".join(name for name in dict.fromkeys(self.files) if name in given)
        overrides = " ".join(place for place in given if place not in self.files)
        return " with ".join(filter(None, (files, overrides)))


def read_layers(paths: Sequence[Path], *, anchored: bool = True) -> list[Layer]:
    """The files, a layer each.

    Args:
        anchored: paths in a file are seen from its folder; False leaves them as they are written.
    """
    if not paths:
        raise JobError("a job needs at least one TOML file")
    layers = [Layer(str(path), _read(path)) for path in paths]
    for layer, path in zip(layers, paths, strict=True):
        if anchored:
            anchor(layer.tables, path.parent)
    return layers


def merge(files: Sequence[Layer], overrides: Sequence[str] = ()) -> tuple[dict[str, Any], Places]:
    """Lay layers over one another, left to right, into one document.

    Tables are joined key by key, to any depth; every other value, a list too, replaces the one before. What
    an override gives replaces a table too.

    Args:
        overrides: `table.key=value` each, the value in TOML; what is no TOML counts as a string.
    """
    document: dict[str, Any] = {}
    layers = list(files)
    for layer in layers:
        document = _lay_over(document, layer.tables)
    for override in overrides:
        keys, value = _read_override(document, override)
        home = _home_of(document, keys)
        if home is not None:
            del home[keys[-1]]
        for key in reversed(keys):
            value = {key: value}
        layers.append(Layer(f"--set {'.'.join(keys)}=…", value))
        document = _lay_over(document, value)
    # Of one layer there is nothing to tell apart.
    paths = _paths(document) if len(layers) > 1 else ()
    owners = {
        ".".join(path): next(layer.place for layer in reversed(layers) if _home_of(layer.tables, path))
        for path in paths
    }
    return document, Places([layer.place for layer in files], owners)


def _lay_over(document: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """A new document. What the layer gives alternatives of makes way."""
    for alternatives in ALTERNATIVES:
        paths = [dotted.split(".") for dotted in alternatives]
        given = [path for path in paths if _home_of(layer, path) is not None]
        for path in paths if given else ():
            home = None if path in given else _home_of(document, path)
            if home is not None:
                del home[path[-1]]
    return _merge_tables(document, layer)


def _merge_tables(below: Any, above: Mapping[str, Any]) -> dict[str, Any]:
    kept = below if isinstance(below, dict) else {}
    given = {
        key: _merge_tables(kept.get(key), value) if isinstance(value, dict) else value
        for key, value in above.items()
    }
    return {**kept, **given}


def _paths(table: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The keys of all values, and of tables that are empty."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, (*inside, key))
        else:
            yield (*inside, key)


def _read_override(document: Mapping[str, Any], override: str) -> tuple[list[str], Any]:
    """The keys of `table.key=value`, and the value."""
    dotted, equals, text = override.partition("=")  # in errors without its value, which may be a key
    keys = dotted.strip().split(".")
    if not equals or len(keys) < 2 or not all(keys):
        raise JobError(f"--set {dotted!r}: expected table.key=value, such as training.group_size=4")
    table: Any = document
    for key in keys[:-1]:
        table = table.get(key, {})
        if not isinstance(table, dict):
            several = isinstance(table, list) and table and isinstance(table[0], dict)
            kind = "several tables, of which --set names none" if several else "a value, not a table"
            raise JobError(f"--set {dotted!r}: {key} is {kind}")
    try:
        return keys, tomli.loads(f"value = {text}")["value"]
    except tomli.TOMLDecodeError:
        return keys, text


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
    """Join a path with its file's folder, unless nothing is there: it then stays as typed."""
    if not isinstance(value, str) or not value or not os.path.exists(folder / value):
        return value
    return os.path.abspath(folder / value)  # not resolved: a link may be moved to another model


def _home_of(document: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """The table that holds a key, if one does."""
    table: Any = document
    for name in path[:-1]:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) and path[-1] in table else None


def _is_in(key: str, table: str) -> bool:
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


def text_to_send(paths: Sequence[Path], overrides: Sequence[str]) -> str:
    """Return the TOML to send to a trainer service: one file's text as it stands, or the merged layers.

    Paths stay as they are written, unlike in `read_layers`: they are paths on the service's machine. The
    service, which knows its own version, checks the meaning.
    """
    if len(paths) == 1 and not overrides:
        try:
            return paths[0].read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise JobError(f"{paths[0]}: no such file") from error
        except (OSError, UnicodeDecodeError) as error:
            raise JobError(f"{paths[0]}: cannot be read: {error}") from error
    document, _ = merge(read_layers(paths, anchored=False), overrides)
    return tomli_w.dumps(document)
