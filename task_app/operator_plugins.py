"""`--plugins FILE`: environments, policies and reward functions of the operator's own, beside `plugins.py`'s.

The file is Python, with some of the dict literals `ENVIRONMENTS` and `POLICIES`, of the same form as there,
and `REWARD_FUNCTIONS`, of what `@reward_function` made. It is run once, when the task app starts, and once in
each process of a reward function; no request can name a file or a class.
"""

import importlib.util
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from service_kit.errors import SettingsError
from task_app.errors import CriticalError, boundary
from task_app.plugins import EnvironmentPlugin, PlugBoards, PolicyPlugin, RewardPlugin
from task_app.protocols import RewardFunction

# What stands on each board, and how to write it.
_KINDS: dict[str, tuple[type[Any], str]] = {
    "ENVIRONMENTS": (EnvironmentPlugin, "write EnvironmentPlugin(ConfigClass, build)"),
    "POLICIES": (PolicyPlugin, "write PolicyPlugin(ConfigClass, build)"),
    "REWARD_FUNCTIONS": (RewardFunction, "decorate it with @reward_function"),
}


def with_plugins(boards: PlugBoards, files: Sequence[Path]) -> PlugBoards:
    """The plug boards with the entries of all files."""
    for file in files:
        found = _boards_of(file)
        rewards = {
            name: RewardPlugin(function.mode, file.resolve())
            for name, function in found["REWARD_FUNCTIONS"].items()
        }
        boards = PlugBoards(
            _joined(boards.environments, found["ENVIRONMENTS"], kind="environment", file=file),
            _joined(boards.policies, found["POLICIES"], kind="policy", file=file),
            _joined(boards.reward_functions, rewards, kind="reward function", file=file),
        )
    return boards


def _boards_of(file: Path) -> dict[str, dict[str, Any]]:
    module = module_of(file)
    if not any(hasattr(module, name) for name in _KINDS):
        raise SettingsError(f"--plugins {file} defines none of {', '.join(_KINDS)}")
    found = {name: getattr(module, name, {}) for name in _KINDS}
    for board, entries in found.items():
        if not isinstance(entries, dict):
            raise SettingsError(f"--plugins {file}: {board} is no dict but {type(entries).__name__}")
        for name, plugin in entries.items():
            kind, advice = _KINDS[board]
            if not isinstance(name, str) or not 1 <= len(name) <= 200:
                raise SettingsError(f"--plugins {file}: {board} has the key {name!r}; a name is needed")
            if not isinstance(plugin, kind):
                told = f"--plugins {file}: {board}[{name!r}] is {type(plugin).__name__}"
                raise SettingsError(f"{told}; {advice}")
    return found


def _joined(known: Mapping[str, Any], more: Mapping[str, Any], *, kind: str, file: Path) -> dict[str, Any]:
    taken = sorted(known.keys() & more.keys())
    if taken:
        raise SettingsError(f"--plugins {file}: {kind} {taken[0]!r} is there already; choose another name")
    return {**known, **more}


def module_of(file: Path) -> ModuleType:
    """Import the file. Its neighbours can be imported by it."""
    if not file.is_file():
        raise SettingsError(f"--plugins {file}: no such file")
    # What is installed comes first, so that no neighbour replaces it.
    folder = str(file.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)
    name = f"turnwise_plugins_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise SettingsError(f"--plugins {file} is no Python file; its name must end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # pydantic looks up annotations of its classes there
    try:
        with boundary(f"--plugins {file}"):
            spec.loader.exec_module(module)
    except CriticalError as exc:
        raise SettingsError(exc.detail) from exc
    return module
