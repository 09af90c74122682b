"""Builds the environments of other libraries and servers by the prefix of `env_name`.

A library that only one kind needs is imported when an environment of that kind is first requested.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shared_schemas.base import Body
from task_app.board import Board
from task_app.errors import InvalidRequest
from task_app.protocols import Environment
from task_app.settings import Reach


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """The config of a kind, and a fast function that builds an environment from the text after the prefix."""

    config: type[Body]
    build: Callable[[str, Any, Reach], Environment]


def _gymnasium() -> ForeignKind:
    from task_app.environments.foreign.configs import GymnasiumConfig

    def build(argument: str, config: GymnasiumConfig, reach: Reach) -> Environment:
        try:
            from task_app.environments.foreign.gymnasium_peer import gymnasium_environment
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] != "gymnasium":
                raise
            raise InvalidRequest(
                "this task app has no gymnasium, which such an environment needs",
                where="env_name",
                hint='the operator installs it: pip install "turnwise[gym]"',
            ) from exc
        return gymnasium_environment(argument, config, reach)

    return ForeignKind(GymnasiumConfig, build)


def _load_later(config: str, peer: str, build: str) -> Callable[[], ForeignKind]:
    """Make the loader of a kind from the names of its config, its module and the building function there."""

    def load() -> ForeignKind:
        configs, module = (
            import_module(f"task_app.environments.foreign.{name}") for name in ("configs", peer)
        )
        return ForeignKind(getattr(configs, config), getattr(module, build))

    return load


FOREIGN: Mapping[str, ForeignKind] = Board(
    {
        "gymnasium": _gymnasium,
        "mcp": _load_later("McpConfig", "mcp_peer", "mcp_environment"),
        "openenv": _load_later("OpenEnvConfig", "openenv_peer", "openenv_environment"),
        "reasoning_gym": _load_later("ReasoningGymConfig", "library_peer", "replayable_environment"),
        "textarena": _load_later("TextArenaConfig", "library_peer", "replayable_environment"),
        "verifiers": _load_later("VerifiersConfig", "library_peer", "verifiers_environment"),
    }
)


def find_kind(env_name: str) -> tuple[ForeignKind, str] | None:
    """Return the kind of the prefix and the argument after it; None without a known prefix."""
    prefix, colon, argument = env_name.partition(":")
    return (FOREIGN[prefix], argument) if colon and prefix in FOREIGN else None
