"""`--plugins FILE`: the operator's own environments, policies and reward functions.

The file is Python with some of the dict literals `ENVIRONMENTS` and `POLICIES`, in the form of `plugins.py`,
and `REWARD_FUNCTIONS`, made with `@reward_function`. It runs once when the task app starts, and once in each
process of a reward function; no request can name a file or a class.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from service_kit.errors import SettingsError
from service_kit.plugin_file import module_of
from task_app.plugins import EnvironmentPlugin, PlugBoards, PolicyPlugin, RewardPlugin
from task_app.protocols import RewardFunction

# The type of the entries on each board, and how to write one.
_KINDS: dict[str, tuple[type[Any], str]] = {
    "ENVIRONMENTS": (EnvironmentPlugin, "write EnvironmentPlugin(ConfigClass, build)"),
    "POLICIES": (PolicyPlugin, "write PolicyPlugin(ConfigClass, build)"),
    "REWARD_FUNCTIONS": (RewardFunction, "decorate it with @reward_function"),
}


def with_plugins(boards: PlugBoards, files: Sequence[Path]) -> PlugBoards:
    """The plug boards with the entries of the files added."""
    for file in files:
        boards_by_name = _boards_of(file)
        rewards = {
            name: RewardPlugin(function.mode, file.resolve())
            for name, function in boards_by_name["REWARD_FUNCTIONS"].items()
        }
        boards = PlugBoards(
            _merge(boards.environments, boards_by_name["ENVIRONMENTS"], kind="environment", file=file),
            _merge(boards.policies, boards_by_name["POLICIES"], kind="policy", file=file),
            _merge(boards.reward_functions, rewards, kind="reward function", file=file),
        )
    return boards


def _boards_of(file: Path) -> dict[str, dict[str, Any]]:
    module = module_of(file, option="--plugins")
    if not any(hasattr(module, name) for name in _KINDS):
        raise SettingsError(f"--plugins {file} defines none of {', '.join(_KINDS)}")
    boards_by_name = {name: getattr(module, name, {}) for name in _KINDS}
    for board, entries in boards_by_name.items():
        if not isinstance(entries, dict):
            raise SettingsError(f"--plugins {file}: {board} is no dict but {type(entries).__name__}")
        for name, plugin in entries.items():
            kind, advice = _KINDS[board]
            if not isinstance(name, str) or not 1 <= len(name) <= 200:
                raise SettingsError(f"--plugins {file}: {board} has the key {name!r}; a name is needed")
            if not isinstance(plugin, kind):
                place = f"--plugins {file}: {board}[{name!r}] is {type(plugin).__name__}"
                raise SettingsError(f"{place}; {advice}")
    return boards_by_name


def _merge(known: Mapping[str, Any], more: Mapping[str, Any], *, kind: str, file: Path) -> dict[str, Any]:
    twice = sorted(known.keys() & more.keys())
    if twice:
        raise SettingsError(f"--plugins {file}: {kind} {twice[0]!r} is there already; choose another name")
    return {**known, **more}
