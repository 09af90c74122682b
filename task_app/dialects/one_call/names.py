"""Pure: the names that other Crafter task apps use -> those on the plug boards."""

from collections.abc import Mapping
from typing import Any

from task_app.errors import UnknownName
from task_app.plugins import ENVIRONMENT_ALIASES, POLICY_ALIASES, PlugBoards


def environment_name(name: str, boards: PlugBoards, *, where: str) -> str:
    """Raises UnknownName when it is neither on the board nor an alias of what is."""
    return _resolved("environment", name, boards.environments, ENVIRONMENT_ALIASES, where=where)


def policy_name(name: str, boards: PlugBoards, *, where: str) -> str:
    """Raises UnknownName when it is neither on the board nor an alias of what is."""
    return _resolved("policy", name, boards.policies, POLICY_ALIASES, where=where)


def _resolved(
    kind: str, name: str, board: Mapping[str, Any], aliases: Mapping[str, str], *, where: str
) -> str:
    found = name if name in board else aliases.get(name.lower(), name)
    if found not in board:
        raise UnknownName(kind, name, {*board, *aliases}, where=where)
    return found
