"""Merges the layers of a job key by key: one or more TOML files, then each `--set table.key=value`.

If several layers set a key, the last of these layers decides. `Places` stores which file or --set each value
came from.

A relative path in a file is resolved against the file's folder if something exists there. Otherwise, and in
--set, it is resolved against the working directory.
"""

import copy
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import tomli
from pydantic.fields import FieldInfo

from shared_schemas.plain_text import read_text
from shared_schemas.rewards import StepRewardKeys
from trainer_backend.errors import JobError
from trainer_backend.job.tables import table_model

REWARD_KEYS = (*StepRewardKeys.model_fields, "step_rewards_horizon")
# A job's name is also a folder's name: it is not `..`, not hidden, and does not look like a flag.
JOB_NAME, LONGEST_NAME = re.compile(r"^[A-Za-z0-9_][A-Za-z0-9._-]*$"), 60
# The tables in which a step-reward switch may be set, as published (DESIGN.md 4.15).
REWARD_HOMES = ("training", "training.rewards", "rollout")
# Keys that name files of code, each with the key in which a run records their SHA-256 (job.code_files).
DIGESTS = {
    "job.trainer_plugins": "job.trainer_plugins_sha256",
    "services.task_plugins": "services.task_plugins_sha256",
    "multi_turn.interaction_config_path": "multi_turn.interaction_config_sha256",
}
# For each step-reward switch: its dotted key in each of these tables.
_SWITCHES = tuple(tuple(f"{home}.{key}" for home in REWARD_HOMES) for key in REWARD_KEYS)
# Groups of alternative keys. A later file or --set that sets one key of a group removes the others.
ALTERNATIVES = (
    ("model.preset", "model.path", "model.name"),
    ("rollout_only.model_path", "rollout_only.inference_url"),
    *_SWITCHES,
)
# Matches a `table.key=value` that a person gave in place of a file by mistake; the value may be a path.
_OVERRIDE = re.compile(r"\w+(\.\w+)+=|\w+=(\{\}|\[\])$")
# Keys whose value is a path, or a list of paths, that must exist before a run starts.
PATHS = (
    "model.path", "inference.vllm_python", "rollout_only.model_path", "services.task_plugins",
    "services.verifiers_python", "services.textarena_python", "services.reasoning_gym_python",
    "services.mcp_servers", "job.trainer_plugins", "data.path", "data.evaluation_path",
    "multi_turn.interaction_config_path",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Layer:
    """The tables of one TOML file or of one `--set`.

    `place` names the file or the --set in errors. It omits the value of --set, which may be a secret key.
    """

    place: str
    tables: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Places:
    """Stores which file or which `--set` each key of a merged job came from."""

    files: Sequence[str]
    """The names of the files, in the order in which they were given."""
    owners: Mapping[str, str] = field(default_factory=dict)
    """Maps the dotted key of each value and of each empty table to its place, a file or a --set. The mapping
    is empty if the job has only one layer."""
    idle: Sequence[str] = ()
    """A warning for each --set that removes a table which no file contains."""

    def of(self, *keys: str) -> str:
        """Return the places where these keys or tables were set, as one text for an error.

        If none of them was set, return the places of the tables that contain them. If no place is found, or
        if no key is given, return all files.
        """
        places: list[str] = []
        while not places and any(keys):
            places = self._find(keys)
            keys = tuple(key.rpartition(".")[0] for key in keys)
        return self._join(places or self.files)

    def is_above(self, key: str, other: str) -> bool:
        """Return whether `key` was set by a later layer than `other`.

        All --set count as one layer, after the files.
        """
        ranks = []
        for name in (key, other):
            place = next((place for owned, place in self.owners.items() if _is_in(owned, name)), None)
            if place is None:
                return False
            ranks.append(self.files.index(place) if place in self.files else len(self.files))
        return ranks[0] > ranks[1]

    def without(self, keys: Collection[str]) -> "Places":
        rest = {key: place for key, place in self.owners.items() if not any(_is_in(key, one) for one in keys)}
        return replace(self, owners=rest)

    def of_all(self, keys: Iterable[str]) -> str:
        """Return the places where these keys and tables were set, as one text for an error.

        If no file set any of them, the text also names all files.
        """
        places = self._find([*keys])
        return self._join(places if set(places) & set(self.files) else [*self.files, *places])

    def _find(self, keys: Collection[str]) -> list[str]:
        """Return the places of these keys, of the keys inside them, and of the tables that contain them."""
        return [
            place
            for owner_key, place in self.owners.items()
            if any(_is_in(owner_key, key) or _is_in(key, owner_key) for key in keys)
        ]

    def _join(self, places: Iterable[str]) -> str:
        """Join places to one text: first the files in their given order, then each --set."""
        names = dict.fromkeys(places)
        files = " + ".join(name for name in dict.fromkeys(self.files) if name in names)
        overrides = " ".join(place for place in names if place not in self.files)
        return " with ".join(filter(None, (files, overrides)))


def read_layers(paths: Sequence[Path], *, anchors_paths: bool = True) -> list[Layer]:
    """Read each file as a layer. If no file sets job.name, the first layer gets the name of its file.

    Args:
        anchors_paths: make a relative path absolute if it exists in the folder of its file.

    Raises:
        JobError: no file is given, or a file cannot be read or is not valid TOML.
    """
    if not paths:
        raise JobError("a job needs at least one TOML file")
    documents = []
    for path in paths:
        try:
            documents.append(tomli.loads(_text(path)))
        except tomli.TOMLDecodeError as error:
            raise JobError(f"{path}: not valid TOML: {error}") from error
    if not any(_find_home(document, ("job", "name")) for document in documents):
        table = documents[0].setdefault("job", {})
        if isinstance(table, dict) and JOB_NAME.fullmatch(paths[0].stem):  # so that my.toml makes runs/my
            table["name"] = paths[0].stem[:LONGEST_NAME]
    if anchors_paths:
        for document, path in zip(documents, paths, strict=True):
            anchor(document, path.parent)
    return [Layer(str(path), document) for path, document in zip(paths, documents, strict=True)]


def merge(
    files: Sequence[Layer], overrides: Sequence[str], tables: Mapping[str, FieldInfo]
) -> tuple[dict[str, Any], Places]:
    """Merge the files, then the overrides, into one document. Return it with the place of each key.

    Tables are merged key by key, at any depth. Any other value replaces the earlier value as a whole. An
    empty table inside a table of the job, and the value of an override, replace even a table as a whole.

    Args:
        overrides: texts of the form `table.key=value`. The value is parsed as TOML; if that fails, it is a
            string. `table={}` and `table.key={}` remove a table or a key of the job, as if no file had set
            it.
        tables: the tables that a job may have, by name. If a NAME is in no file and not in `tables`,
            `NAME={}` adds an empty table, so that the schema reports the unknown name.
    """
    document: dict[str, Any] = {}
    layers, idle = list(files), []
    for layer in layers:
        document = _lay_over(document, layer.tables)
    for override in overrides:
        keys, value = _read_override(document, override, tables)
        dotted, home = ".".join(keys), _find_home(document, keys)
        # Whether an earlier layer set it, to a value or, at the top level, to any table.
        is_given = home is not None and (len(keys) == 1 or not isinstance(home[keys[-1]], dict))
        if value == {} and (is_given or _is_known(keys, tables)):
            if len(keys) == 1 and not any(keys[0] in layer.tables for layer in files):
                idle.append(
                    f"--set {keys[0]}={{}} removes a table, and no file has [{keys[0]}]; to have it with its "
                    "defaults, set one of its keys"
                )
            same = next((places for places in _SWITCHES if dotted in places), ())
            document = without(document, {dotted, *same, DIGESTS.get(dotted, dotted)})
            continue
        if home is not None:
            del home[keys[-1]]
        for key in reversed(keys):
            value = {key: value}
        layers.append(Layer(f"--set {dotted}=…", value))
        document = _lay_over(document, value)
    # With one layer every key has the same place, so none is stored.
    paths = _paths(document) if len(layers) > 1 else ()
    owners = {
        ".".join(path): next(layer.place for layer in reversed(layers) if _find_home(layer.tables, path))
        for path in paths
    }
    return document, Places([layer.place for layer in files], owners, idle)


def _is_known(keys: Sequence[str], tables: Mapping[str, FieldInfo]) -> bool:
    """Return whether a job may have this table or key; a step-reward switch may be in several tables."""
    if any(".".join(keys) in places for places in _SWITCHES):
        return True
    if keys[0] not in tables or len(keys) > 2:
        return False
    return len(keys) == 1 or keys[1] in table_model(tables[keys[0]]).model_fields


def without(document: Mapping[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    rest = copy.deepcopy(dict(document))
    for key in keys:
        path = key.split(".")
        home = _find_home(rest, path)
        if home is not None:
            del home[path[-1]]
    return rest


def _lay_over(document: dict[str, Any], layer: Mapping[str, Any]) -> dict[str, Any]:
    """Merge a layer into a document.

    If the layer sets a key of a group in ALTERNATIVES, the other keys of the group are removed from the
    document. If the layer names files of code, the recorded SHA-256 of these files is removed.
    """
    # A layer that names files accepts their current content, so their recorded SHA-256 is removed. A layer
    # that has only the SHA-256 values, such as the empty lists of a printed job, removes nothing.
    gone = [digests for files, digests in DIGESTS.items() if _find_home(layer, files.split("."))]
    for alternatives in ALTERNATIVES:
        others = [dotted for dotted in alternatives if not _find_home(layer, dotted.split("."))]
        gone += others if len(others) < len(alternatives) else []
    return _merge_tables(without(document, gone), layer)


def _merge_tables(below: Any, above: Mapping[str, Any], depth: int = 0) -> dict[str, Any]:
    """Merge two tables key by key; the values of `above` replace those of `below`.

    An empty table inside a table of the job, such as `model.chat_template_kwargs={}`, replaces the table in
    `below`. An empty table of the job itself, such as a header `[training]` without keys, removes nothing.
    `depth` is 0 for the whole job and 1 for its tables.
    """
    if depth > 1 and not above:
        return {}
    lower = below if isinstance(below, dict) else {}
    upper = {
        key: _merge_tables(lower.get(key), value, depth + 1) if isinstance(value, dict) else value
        for key, value in above.items()
    }
    return {**lower, **upper}


def _paths(table: Mapping[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Yield the path of each value and of each empty table in a table, as a tuple of keys."""
    for key, value in table.items():
        if isinstance(value, dict) and value:
            yield from _paths(value, (*inside, key))
        else:
            yield (*inside, key)


def _read_override(
    document: Mapping[str, Any], override: str, tables: Mapping[str, FieldInfo]
) -> tuple[list[str], Any]:
    """Split `table.key=value` into its keys and its value.

    Raises JobError if the override is malformed. The schema, not this function, refuses unknown tables.
    """
    dotted, equals, text = override.partition("=")  # errors omit the value, which may be a secret key
    keys = dotted.strip().split(".")
    value: Any = text
    with suppress(tomli.TOMLDecodeError):  # text that is not TOML is a string
        value = tomli.loads(f"value = {text}")["value"]
    is_list = keys[0] in tables and tables[keys[0]].default == ()
    if len(keys) == 1 and is_list and value == []:
        value = {}
    if not equals or not all(keys) or (keys[0] in tables and len(keys) == 1 and value != {}):
        raise JobError(
            f"--set {dotted!r}: expected table.key=value, such as training.group_size=4, or table={{}}, "
            "which removes the table"
        )
    for files, digests in DIGESTS.items():
        if keys == digests.split("."):
            raise JobError(f"--set {dotted!r}: a run notes it; naming {files} accepts what is there")
    table: Any = document
    for key in keys[:-1]:
        table = table.get(key, {})
        if not isinstance(table, dict):
            several = isinstance(table, list) and table and isinstance(table[0], dict)
            kind = "several tables, of which --set names none" if several else "a value, not a table"
            raise JobError(f"--set {dotted!r}: {key} is {kind}")
    return keys, value


def anchor(document: Mapping[str, Any], folder: Path) -> None:
    """Make each relative path in the keys of PATHS absolute, in place, if it exists in `folder`."""
    for dotted in PATHS:
        table, _, key = dotted.partition(".")
        section = document.get(table)
        for home in section if isinstance(section, list) else [section]:  # [[table]] gives a list
            if not isinstance(home, dict) or key not in home:
                continue
            if isinstance(home[key], list):
                home[key] = [_anchor_value(value, folder) for value in home[key]]
            else:
                home[key] = _anchor_value(home[key], folder)


def _anchor_value(value: Any, folder: Path) -> Any:
    """Return the absolute path of `value` in `folder` if it exists there, else `value` unchanged."""
    if not isinstance(value, str) or not value or not os.path.exists(folder / value):
        return value
    return os.path.abspath(folder / value)  # keeps links, because they may later point to another model


def _find_home(document: Mapping[str, Any], path: Sequence[str]) -> dict[str, Any] | None:
    """Return the table that contains the last key of `path`, or None if the document lacks this key."""
    table: Any = document
    for name in path[:-1]:
        table = table.get(name) if isinstance(table, dict) else None
    return table if isinstance(table, dict) and path[-1] in table else None


def _is_in(key: str, table: str) -> bool:
    """Return whether `key` is `table` itself or a key inside it."""
    return f"{key}.".startswith(f"{table}.")


def _text(path: Path) -> str:
    try:
        return read_text(path)
    except FileNotFoundError as error:
        meant = f". Did you mean --set '{path}'?" if _OVERRIDE.match(str(path)) else ""
        raise JobError(f"{path}: no such file{meant}") from error
    except (OSError, ValueError) as error:
        raise JobError(f"{path}: cannot be read: {error}") from error


def text_that_names_its_job(path: Path) -> str | None:
    """Return a file's text, to be sent unchanged, if it sets job.name or is not valid TOML; else None."""
    text = _text(path)
    try:
        return text if _find_home(tomli.loads(text), ("job", "name")) else None
    except tomli.TOMLDecodeError:
        return text  # the service reports what is wrong
