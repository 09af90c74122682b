"""The operator's own code: a Python file as a module, and what installed packages offer as entry points.

It imports little, so that the process of a reward function starts in half a second.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from service_kit.boundary import Boundary
from service_kit.errors import ServiceError, SettingsError

# Folders of files that were imported, whose modules others may import by their names.
_FOLDERS: set[Path] = set()


def load_module(file: Path, *, option: str) -> ModuleType:
    """Import the file, which may import its neighbours; `option` names it in errors, a key of a job or
    `--plugins`.

    Raises SettingsError where it is no Python file, or raises when it is imported; the log gets the
    traceback. Or a neighbour's name is that of a module which another folder's file has imported.
    """
    place = f"{option} {file}"
    if not file.is_file():
        raise SettingsError(f"{place}: no such file")
    folder = file.resolve().parent
    _refuse_other_neighbours(folder, place)
    _FOLDERS.add(folder)
    # At the end of the path, so that no neighbour replaces an installed module.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    name = f"turnwise_plugins_{file.stem}_{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{place} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations of its classes there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), place)
    return module


def _refuse_other_neighbours(folder: Path, place: str) -> None:
    """Refuse a folder of whose modules Python would take the namesakes in another plug-in's folder."""
    for entry in sorted(folder.iterdir()):
        name = entry.stem if entry.suffix == ".py" else entry.name
        file = getattr(sys.modules.get(name), "__file__", None)
        if file is None:
            continue
        taken = Path(file).resolve()
        home = taken.parent.parent if taken.name == "__init__.py" else taken.parent
        if home != folder and home in _FOLDERS:
            raise SettingsError(f"{place}: its neighbour {name!r} would be {taken}; rename one of the two")


@dataclass(frozen=True, slots=True)
class PackagePlug:
    """An entry point of a package."""

    name: str
    """Name of the entry point."""
    value: str
    """`module:object`."""
    plug: Any
    place: str
    """The package and the entry point, for errors."""


def package_plugs(group: str) -> Iterator[PackagePlug]:
    """Load the entry points of a group, in the order of their names.

    Raises SettingsError where one cannot be imported; the log gets the traceback.
    """
    for point in sorted(find_entry_points(group), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else "a package"
        place = f"{package}, entry point {point.name!r} of {group!r}"
        yield PackagePlug(point.name, point.value, _run(point.load, place), place)


def built_in_environments() -> list[str]:
    """The environments that come with Turnwise, by the files of task_app/environments; none is imported."""
    folder = Path(__file__).parents[1] / "task_app/environments"
    return sorted(module.name for module in iter_modules([str(folder)]) if module.name != "foreign")


def find_entry_points(group: str) -> EntryPoints:
    """The entry points of a group, by a scan of all packages that every group shares (some 8 ms)."""
    return _scan(tuple(_changed_at(place) for place in sys.path))(group=group)


@lru_cache(maxsize=1)
def _scan(places: tuple[tuple[str, int], ...]) -> Callable[..., EntryPoints]:
    """How to select from all packages in `sys.path`, as long as its folders stay as they are."""
    # Python 3.11 has another class than 3.12 for the whole; `select` of both gives EntryPoints of a group.
    return entry_points().select


def _changed_at(place: str) -> tuple[str, int]:
    try:
        return place, os.stat(place or ".").st_mtime_ns
    except OSError:
        return place, 0


def _run(load: Callable[[], Any], place: str) -> Any:
    with Boundary(place, SettingsError):
        try:
            return load()
        except ServiceError as error:
            raise SettingsError(f"{place}: {error}") from error
