"""The prefixes of `env_name`: what follows one names an environment of another library or of a server.

A library that only one kind needs is imported when an environment of that kind is first named.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shared_schemas.base import Body
from task_app.environments.foreign.configs import (
    GymnasiumConfig,
    McpConfig,
    OpenEnvConfig,
    ReasoningGymConfig,
    TextArenaConfig,
    VerifiersConfig,
)
from task_app.environments.foreign.library_peer import replayable_environment, verifiers_environment
from task_app.environments.foreign.mcp_peer import mcp_environment
from task_app.environments.foreign.openenv_peer import openenv_environment
from task_app.errors import InvalidRequest
from task_app.protocols import Environment
from task_app.settings import Reach


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """How to build an environment of the argument after the prefix, cheaply."""

    config: type[Body]
    build: Callable[[str, Any, Reach], Environment]


def _gymnasium(argument: str, config: GymnasiumConfig, reach: Reach) -> Environment:
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


FOREIGN: dict[str, ForeignKind] = {
    "gymnasium": ForeignKind(GymnasiumConfig, _gymnasium),
    "mcp": ForeignKind(McpConfig, mcp_environment),
    "openenv": ForeignKind(OpenEnvConfig, openenv_environment),
    "reasoning_gym": ForeignKind(ReasoningGymConfig, replayable_environment),
    "textarena": ForeignKind(TextArenaConfig, replayable_environment),
    "verifiers": ForeignKind(VerifiersConfig, verifiers_environment),
}


def kind_of(env_name: str) -> tuple[ForeignKind, str] | None:
    """The kind that the prefix names and the argument after it; None without a known prefix."""
    prefix, colon, argument = env_name.partition(":")
    return (FOREIGN[prefix], argument) if colon and prefix in FOREIGN else None
