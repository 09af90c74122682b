"""The operator's own plug-ins, from `--plugins FILE` and from packages.

The file is Python that defines any of four dicts: `ENVIRONMENTS` and `POLICIES` with entries as in
`plugins.py`, `AGENTS` (task_app.captures.agents), and `REWARD_FUNCTIONS` (see `@reward_function`). It is
executed when the task app starts, and in each process of a reward function; requests cannot name files or
classes. An installed package offers the same through entry points.
"""

from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from service_kit.errors import SettingsError
from service_kit.plugin_file import load_module, package_plugs
from task_app.captures.agents import PREFIX, Agent, agent_plugin
from task_app.plugins import EnvironmentPlugin, PlugBoards, PolicyPlugin, RewardPlugin
from task_app.protocols import RewardFunction

# Type of the entries of each board, their name in errors, and advice on how to write them.
_KINDS: dict[str, tuple[type[Any], str, str]] = {
    "ENVIRONMENTS": (EnvironmentPlugin, "environment", "write EnvironmentPlugin(ConfigClass, build)"),
    "POLICIES": (PolicyPlugin, "policy", "write PolicyPlugin(ConfigClass, build)"),
    "REWARD_FUNCTIONS": (RewardFunction, "reward function", "decorate it with @reward_function"),
    "AGENTS": (Agent, "agent", "write Agent([program, argument, ...])"),
}


def with_plugins(boards: PlugBoards, files: Sequence[Path]) -> PlugBoards:
    """Add the entries of the files to the plug boards."""
    for file in files:
        place = f"--plugins {file}"
        module = load_module(file, option="--plugins")
        if not any(hasattr(module, name) for name in _KINDS):
            raise SettingsError(f"{place} defines none of {', '.join(_KINDS)}")
        for board in _KINDS:
            entries = getattr(module, board, {})
            if not isinstance(entries, dict):
                raise SettingsError(f"{place}: {board} is no dict but {type(entries).__name__}")
            boards = _add_entries(boards, board, entries, place=place, source=str(file.resolve()))
    return boards


def with_packages(boards: PlugBoards) -> PlugBoards:
    """Add the entry points of installed packages to the plug boards."""
    for board in _KINDS:
        for point in package_plugs(f"turnwise.{board.lower()}"):
            entries = {point.name: point.plug}
            boards = _add_entries(boards, board, entries, place=point.place, source=point.value)
    return boards


def _add_entries(
    boards: PlugBoards, board: str, entries: Mapping[Any, Any], *, place: str, source: str
) -> PlugBoards:
    """Add entries to a board. Raises SettingsError if a type is wrong or a name is taken."""
    kind, noun, advice = _KINDS[board]
    field = "environments" if board == "AGENTS" else board.lower()
    known: Any = getattr(boards, field)
    for name, plug in entries.items():
        if not isinstance(name, str) or not 1 <= len(name) <= 200:
            raise SettingsError(f"{place}: {board} has the key {name!r}; a name is needed")
        if not isinstance(plug, kind):
            raise SettingsError(f"{place}: {board}[{name!r}] is {type(plug).__name__}; {advice}")
        whole = PREFIX + name if board == "AGENTS" else name
        if whole in known:
            home = boards.homes.get((field, whole), "built in")
            raise SettingsError(f"{place}: {noun} {name!r} is there already ({home}); choose another name")
    own = dict(entries)
    if board == "REWARD_FUNCTIONS":
        own = {name: RewardPlugin(plug.mode, source) for name, plug in entries.items()}
    elif board == "AGENTS":
        own = {PREFIX + name: agent_plugin(name, agent) for name, agent in entries.items()}
    homes = {**boards.homes, **{(field, name): f"of {place}" for name in own}}
    changes: dict[str, Any] = {field: ChainMap(own, known), "homes": homes}  # loads no entry
    return replace(boards, **changes)
