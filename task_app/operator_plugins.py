"""Loads the operator's own plug-ins, from `--plugins FILE` and from installed packages.

FILE is a Python file that defines any of four dicts: `ENVIRONMENTS` and `POLICIES` with entries as in
`plugins.py`, `AGENTS` (task_app.captures.agents), and `REWARD_FUNCTIONS` (see `@reward_function`). The file
is executed when the task app starts, and again in each process that runs a reward function. Requests can name
plug-ins only by the keys of these dicts, never by file or class. An installed package can offer the same
kinds of plug-ins through its entry points.
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

# For each dict: the type of its entries, their name in errors, and advice on how to write an entry.
_KINDS: dict[str, tuple[type[Any], str, str]] = {
    "ENVIRONMENTS": (EnvironmentPlugin, "environment", "write EnvironmentPlugin(ConfigClass, build)"),
    "POLICIES": (PolicyPlugin, "policy", "write PolicyPlugin(ConfigClass, build)"),
    "REWARD_FUNCTIONS": (RewardFunction, "reward function", "decorate it with @reward_function"),
    "AGENTS": (Agent, "agent", "write Agent([program, argument, ...])"),
}


def with_plugins(boards: PlugBoards, files: Sequence[Path]) -> PlugBoards:
    """Return the plug boards with the entries of the files. Raises SettingsError if a file is invalid."""
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
    """Return the plug boards with the plug-ins that installed packages offer as entry points."""
    for board in _KINDS:
        for point in package_plugs(f"turnwise.{board.lower()}"):
            entries = {point.name: point.plug}
            boards = _add_entries(boards, board, entries, place=point.place, source=point.value)
    return boards


def _add_entries(
    boards: PlugBoards, board: str, entries: Mapping[Any, Any], *, place: str, source: str
) -> PlugBoards:
    """Return the plug boards with `entries` added to one board, such as "ENVIRONMENTS".

    `place` names the file or entry point in errors; `source` becomes `RewardPlugin.source`. Raises
    SettingsError if an entry has a wrong type, or if a name is invalid or taken.
    """
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
    changes: dict[str, Any] = {field: ChainMap(own, known), "homes": homes}  # loads no plug-in
    return replace(boards, **changes)
