"""Reads the published YAML or TOML file of interactions (`--interactions FILE`).

    interaction:
      - class_name: "verl.interactions.gsm8k_interaction.Gsm8kInteraction"
        config: {}

The file is read once, when the task app starts. The classes that it names are imported from installed
packages and from the file's folder. A request can name an entry of the file, but it cannot name a class.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog
import tomli
from pydantic import Field, ValidationError

from service_kit.errors import SettingsError
from service_kit.plugin_file import package_plugs
from shared_schemas.base import Body
from shared_schemas.plain_text import read_text
from shared_schemas.rollouts import default_interaction_name
from task_app.complaints import invalid, most_specific
from task_app.errors import CriticalError, TaskAppError, boundary
from task_app.interactions import gsm8k
from task_app.interactions.gsm8k import compute_score, extract_solution
from task_app.interactions.live import ConnectedInteraction
from task_app.plugins import InteractionEntry
from task_app.protocols import BaseInteraction
from task_app.settings import Settings

log = structlog.get_logger("task_app")

_METHODS = ("start_interaction", "generate_response", "calculate_score", "finalize_interaction")


class _Row(Body):
    class_name: str = Field(min_length=3, max_length=500, pattern=r"^\w+(\.\w+)+$")
    config: dict[str, Any] = Field(default_factory=dict)
    name: str | None = Field(default=None, min_length=1, max_length=200)


class _File(Body):
    interaction: tuple[_Row, ...] = Field(min_length=1)


def load_interactions(path: Path, settings: Settings) -> dict[str, InteractionEntry]:
    """Return the entries of the file by name, after checking that each class can be built.

    Raises:
        SettingsError: the file or one of its entries is invalid.
    """
    rows = _read_rows(path)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    entries: dict[str, InteractionEntry] = {}
    offer_stand_ins()
    for index, row in enumerate(rows):
        where = f"{path}: interaction.{index}"
        name = row.name or default_interaction_name(row.class_name)
        if not name:
            detail = f"class {row.class_name!r} gives no default name; set name for this entry"
            raise SettingsError(f"{where}: {detail}")
        if name in entries:
            raise SettingsError(f"{where}: the name {name!r} is taken; give each entry a name of its own")
        entry = InteractionEntry(name, _import_class(row.class_name, where=where), row.config)
        _try_entry(entry, settings, where=where)
        entries[name] = entry
    return entries


def package_interactions(settings: Settings) -> dict[str, InteractionEntry]:
    """Return the interactions that installed packages offer as entry points, by name.

    An entry of the operator's file with the same name has priority.
    """
    offer_stand_ins()
    entries: dict[str, InteractionEntry] = {}
    for point in package_plugs("turnwise.interactions"):
        if point.name in entries:
            raise SettingsError(f"{point.place}: another package offers an interaction {point.name!r} too")
        entry = InteractionEntry(point.name, _check_class(point.plug, place=point.place), {})
        _try_entry(entry, settings, where=point.place)
        entries[point.name] = entry
    return entries


def _read_rows(path: Path) -> tuple[_Row, ...]:
    document = _parse_file(path)
    for place, text in _find_texts(document):
        if re.search(r"\$\{[^}]*\}", text):
            raise SettingsError(f"{path}: {place} is {text!r}; write the value itself: ${{}} is not resolved")
    try:
        return _File.model_validate(document).interaction
    except ValidationError as exc:
        error = most_specific(exc.errors(include_url=False))
        known = _Row.model_fields if "interaction" in error["loc"] else _File.model_fields
        raise SettingsError(f"{path}: {invalid(error, known=known).detail}") from exc


def _parse_file(path: Path) -> Any:
    readers: dict[str, Callable[[str], Any]] = {
        ".yaml": _parse_yaml,
        ".yml": _parse_yaml,
        ".toml": tomli.loads,
    }
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise SettingsError(f"--interactions {path}: the name must end in {', '.join(readers)}")
    try:
        return reader(read_text(path))
    except OSError as exc:
        raise SettingsError(f"--interactions {path} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise SettingsError(f"{path} is no {path.suffix[1:].upper()}: {' '.join(str(exc).split())}") from exc


def _parse_yaml(text: str) -> Any:
    import yaml

    try:
        _refuse_repeated_keys(yaml.compose(text, Loader=yaml.SafeLoader))
        return yaml.safe_load(text)
    except yaml.YAMLError as exc:
        raise ValueError(str(exc)) from exc


def _refuse_repeated_keys(node: Any) -> None:
    """Raise ValueError if a key is given twice, because YAML would silently drop the first value."""
    import yaml

    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key in keys:
            if keys.count(key) > 1:
                raise ValueError(f"{key!r} is given twice in line {node.start_mark.line + 1} and after it")
        for _, value in node.value:
            _refuse_repeated_keys(value)
    elif isinstance(node, yaml.SequenceNode):
        for value in node.value:
            _refuse_repeated_keys(value)


def _find_texts(value: Any, place: str = "") -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every string in a parsed file."""
    if isinstance(value, str):
        yield place.removeprefix("."), value
    elif isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _find_texts(part, f"{place}.{key}")


def _import_class(class_name: str, *, where: str) -> type[Any]:
    module_name, _, last = class_name.rpartition(".")
    place = f"{where}.class_name {class_name!r}"
    try:
        with boundary(place):
            module = _import_module(module_name, place)
    except CriticalError as exc:
        raise SettingsError(exc.detail) from exc
    kind = getattr(module, last, None)
    if kind is None:
        raise SettingsError(f"{place}: module {module_name!r} has no {last!r}")
    return _check_class(kind, place=place)


def _check_class(kind: Any, *, place: str) -> type[Any]:
    if not isinstance(kind, type):
        raise SettingsError(f"{place} is no class but {type(kind).__name__}")
    methods = {method: getattr(kind, method, None) for method in _METHODS}
    missing = [name for name, method in methods.items() if not callable(method)]
    if missing:
        raise SettingsError(f"{place} has no {missing[0]}; derive it from BaseInteraction")
    if methods["generate_response"] is BaseInteraction.generate_response:
        detail = "has no generate_response of its own, and the one of BaseInteraction scores every answer 0.8"
        log.warning("interaction_without_an_answer_of_its_own", detail=f"{place} {detail}")
    return kind


def _import_module(module_name: str, place: str) -> ModuleType:
    """Import the module of a class.

    Raises SettingsError if the module does not exist. Errors inside the module are not caught.
    """
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as exc:
        if not f"{module_name}.".startswith(f"{exc.name}."):
            raise
        where = "it is imported from what is installed, or from the folder of this file"
        raise SettingsError(f"{place}: {exc.msg}; {where}") from exc


def _try_entry(entry: InteractionEntry, settings: Settings, *, where: str) -> None:
    try:
        with boundary(f"{where}: {entry.kind.__name__}(config)"):
            interaction = entry.build()
            if isinstance(interaction, ConnectedInteraction):
                interaction.check(settings)
    except TaskAppError as exc:
        detail = exc.detail if exc.detail.startswith(where) else f"{where}: {exc.detail}"
        raise SettingsError(detail) from exc


# Contents of our stand-ins for modules of `verl`, by module name; packages are empty.
_STAND_IN_CONTENTS: Mapping[str, Mapping[str, Any]] = {
    "verl": {},
    "verl.interactions": {},
    "verl.interactions.base": {"BaseInteraction": BaseInteraction},
    "verl.interactions.gsm8k_interaction": {"Gsm8kInteraction": gsm8k.Gsm8kInteraction},
    "verl.utils": {},
    "verl.utils.reward_score": {},
    "verl.utils.reward_score.gsm8k": {"compute_score": compute_score, "extract_solution": extract_solution},
}


class _StandIns(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _STAND_IN_CONTENTS:
            return None
        return ModuleSpec(fullname, self, is_package=not _STAND_IN_CONTENTS[fullname])

    def exec_module(self, module: ModuleType) -> None:
        vars(module).update(_STAND_IN_CONTENTS[module.__name__])


STAND_INS = _StandIns()


def offer_stand_ins() -> None:
    """Make stand-ins importable for the modules of `verl` that published interaction classes import.

    A module of an installed verl has priority over its stand-in. The stand-ins stay until the process ends,
    because a class may import a module inside a method at any time. A second call changes nothing.
    """
    if STAND_INS not in sys.meta_path:
        # Last in the list, so that a stand-in is imported only if no installed verl contains the module.
        sys.meta_path.append(STAND_INS)
