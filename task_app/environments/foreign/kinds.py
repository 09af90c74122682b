"""The prefixes of `env_name`: what follows one names an environment of another library or of a server.

A library that only one kind needs is imported when an environment of that kind is first named.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from shared_schemas.base import Body
from task_app.board import Board
from task_app.errors import InvalidRequest
from task_app.protocols import Environment
from task_app.settings import Reach


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """How to build an environment of the argument after the prefix, cheaply."""

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


def _mcp() -> ForeignKind:
    from task_app.environments.foreign.configs import McpConfig
    from task_app.environments.foreign.mcp_peer import mcp_environment

    return ForeignKind(McpConfig, mcp_environment)


def _openenv() -> ForeignKind:
    from task_app.environments.foreign.configs import OpenEnvConfig
    from task_app.environments.foreign.openenv_peer import openenv_environment

    return ForeignKind(OpenEnvConfig, openenv_environment)


def _reasoning_gym() -> ForeignKind:
    from task_app.environments.foreign.configs import ReasoningGymConfig
    from task_app.environments.foreign.library_peer import replayable_environment

    return ForeignKind(ReasoningGymConfig, replayable_environment)


def _textarena() -> ForeignKind:
    from task_app.environments.foreign.configs import TextArenaConfig
    from task_app.environments.foreign.library_peer import replayable_environment

    return ForeignKind(TextArenaConfig, replayable_environment)


def _verifiers() -> ForeignKind:
    from task_app.environments.foreign.configs import VerifiersConfig
    from task_app.environments.foreign.library_peer import verifiers_environment

    return ForeignKind(VerifiersConfig, verifiers_environment)


FOREIGN: Mapping[str, ForeignKind] = Board(
    {
        "gymnasium": _gymnasium,
        "mcp": _mcp,
        "openenv": _openenv,
        "reasoning_gym": _reasoning_gym,
        "textarena": _textarena,
        "verifiers": _verifiers,
    }
)


def find_kind(env_name: str) -> tuple[ForeignKind, str] | None:
    """The kind that the prefix names and the argument after it; None without a known prefix."""
    prefix, colon, argument = env_name.partition(":")
    return (FOREIGN[prefix], argument) if colon and prefix in FOREIGN else None
