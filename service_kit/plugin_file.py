"""Loads plug-ins of the operator from Python files and from entry points of installed packages.

This module has few imports, because the process of a reward function imports it and has to start within half
a second.
"""

import hashlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import EntryPoints, entry_points
from pathlib import Path
from pkgutil import iter_modules
from types import ModuleType
from typing import Any

from service_kit.boundary import Boundary
from service_kit.errors import ServiceError, SettingsError

# Folders of the plug-in files that were imported; all of these folders are in sys.path.
_FOLDERS: set[Path] = set()


def load_module(file: Path, *, option: str) -> ModuleType:
    """Import a plug-in's Python file, which may import other modules in its folder.

    Args:
        option: the setting that names the file, such as `--plugins` or a key of a job; used in errors.

    Raises:
        SettingsError: `file` is not a Python file; or its import raises, and the log gets the traceback; or a
            module in its folder has the name of a module that was imported from another plug-in's folder.
    """
    place = f"{option} {file}"
    if not file.is_file():
        raise SettingsError(f"{place}: no such file")
    folder = file.resolve().parent
    _refuse_other_neighbours(folder, place)
    _FOLDERS.add(folder)
    # Append to the end of sys.path, so that no module in the folder shadows an installed one.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    name = f"turnwise_plugins_{file.stem}_{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{place} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up the annotations of the module's classes there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), place)
    return module


def _refuse_other_neighbours(folder: Path, place: str) -> None:
    """Raise SettingsError if a module of another plug-in's folder hides a module in `folder`.

    This happens if both modules have the same name and the other module was imported before.
    """
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
    """A plug-in that was imported from an entry point of an installed package."""

    name: str
    value: str
    """The entry point's value, in the form `module:object`."""
    plug: Any
    place: str
    """Names the package and the entry point in error messages."""


def package_plugs(group: str) -> Iterator[PackagePlug]:
    """Import the entry points of a group one by one, in the order of their names, and yield each plug-in.

    Raises:
        SettingsError: an entry point cannot be imported; the log gets the traceback.
    """
    for point in sorted(find_entry_points(group), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else "a package"
        place = f"{package}, entry point {point.name!r} of {group!r}"
        yield PackagePlug(point.name, point.value, _run(point.load, place), place)


def built_in_environments() -> list[str]:
    """Return the names of Turnwise's own environments, which are modules of task_app/environments.

    The modules are listed without importing them.
    """
    folder = Path(__file__).parents[1] / "task_app/environments"
    return sorted(module.name for module in iter_modules([str(folder)]) if module.name != "foreign")


def find_entry_points(group: str) -> EntryPoints:
    """Return the entry points of a group.

    The first call scans all installed packages, which takes about 8 ms. Later calls reuse the result, for any
    group, until a folder in `sys.path` changes.
    """
    changes_ns = []
    for place in sys.path:
        with suppress(OSError):
            changes_ns.append((place, os.stat(place or ".").st_mtime_ns))
    return _scan_packages(tuple(changes_ns))(group=group)


@lru_cache(maxsize=1)
def _scan_packages(changes_ns: tuple[tuple[str, int], ...]) -> Callable[..., EntryPoints]:
    """Scan all installed packages and return a function that selects entry points from the result.

    `changes_ns` contains the modification time of each folder in `sys.path`. It is the key of the cache, so
    packages are scanned again after a folder has changed.
    """
    # The class of the result differs between Python 3.11 and 3.12, but both classes have `select`.
    return entry_points().select


def _run(load: Callable[[], Any], place: str) -> Any:
    with Boundary(place, SettingsError):
        try:
            return load()
        except ServiceError as error:
            raise SettingsError(f"{place}: {error}") from error
