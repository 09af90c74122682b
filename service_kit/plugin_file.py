"""Loads the operator's own code: Python files, and entry points of installed packages.

It imports little, so that the process of a reward function starts in half a second.
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

# Folders of the imported plug-in files; sys.path contains all of them.
_FOLDERS: set[Path] = set()


def load_module(file: Path, *, option: str) -> ModuleType:
    """Import a Python file, which may import other modules of its folder.

    `option` is the setting that names the file (a key of a job, or `--plugins`), for errors. Raises
    SettingsError if `file` is no Python file, if its import raises (the log gets the traceback), or if a
    module of its folder has the name of a module that was imported from another plug-in's folder.
    """
    place = f"{option} {file}"
    if not file.is_file():
        raise SettingsError(f"{place}: no such file")
    folder = file.resolve().parent
    _refuse_other_neighbours(folder, place)
    _FOLDERS.add(folder)
    # At the end of sys.path, so that no module of the folder replaces an installed one.
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
    name = f"turnwise_plugins_{file.stem}_{hashlib.sha256(bytes(folder)).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"{place} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic resolves the annotations of its classes there
    loader = spec.loader
    _run(lambda: loader.exec_module(module), place)
    return module


def _refuse_other_neighbours(folder: Path, place: str) -> None:
    """Raise SettingsError if Python would import another plug-in folder's module instead of this folder's."""
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
    """A plug-in that an installed package declares as an entry point, after its import."""

    name: str
    value: str
    """`module:object`."""
    plug: Any
    place: str
    """The package and the entry point, for errors."""


def package_plugs(group: str) -> Iterator[PackagePlug]:
    """Load the entry points of a group, sorted by name.

    Raises SettingsError if an entry point cannot be imported; the log gets the traceback.
    """
    for point in sorted(find_entry_points(group), key=lambda point: (point.name, point.value)):
        package = point.dist.name if point.dist is not None else "a package"
        place = f"{package}, entry point {point.name!r} of {group!r}"
        yield PackagePlug(point.name, point.value, _run(point.load, place), place)


def built_in_environments() -> list[str]:
    """Return the names of Turnwise's own environments: the modules of task_app/environments; import none."""
    folder = Path(__file__).parents[1] / "task_app/environments"
    return sorted(module.name for module in iter_modules([str(folder)]) if module.name != "foreign")


def find_entry_points(group: str) -> EntryPoints:
    """Find the entry points of a group; one scan of all packages (some 8 ms) serves every group."""
    changes_ns = []
    for place in sys.path:
        with suppress(OSError):
            changes_ns.append((place, os.stat(place or ".").st_mtime_ns))
    return _scan_packages(tuple(changes_ns))(group=group)


@lru_cache(maxsize=1)
def _scan_packages(changes_ns: tuple[tuple[str, int], ...]) -> Callable[..., EntryPoints]:
    """Return the function that selects entry points; the cache lasts until a folder of `sys.path` changes."""
    # The class of all entry points differs between Python 3.11 and 3.12; `select` is common to both.
    return entry_points().select


def _run(load: Callable[[], Any], place: str) -> Any:
    with Boundary(place, SettingsError):
        try:
            return load()
        except ServiceError as error:
            raise SettingsError(f"{place}: {error}") from error
