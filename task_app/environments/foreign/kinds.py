"""Chooses the adapter for an environment of another library or server by the prefix of `env_name`."""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from shared_schemas.base import Body
from task_app.errors import InvalidRequest
from task_app.protocols import Environment
from task_app.settings import Reach


@dataclass(frozen=True, slots=True)
class ForeignKind:
    """A kind of environment: its config class, and the function that builds it.

    The fields contain only names, so that a module and its library are imported only when they are needed.
    """

    config_class: str
    module: str
    function: str
    """Name of the function that builds an environment; this function must be fast."""

    @property
    def config(self) -> type[Body]:
        config: type[Body] = getattr(_import("configs"), self.config_class)
        return config

    def build(self, argument: str, config: Body, reach: Reach) -> Environment:
        try:
            module = _import(self.module)
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] != "gymnasium":
                raise
            raise InvalidRequest(
                "this task app has no gymnasium, which such an environment needs",
                where="env_name",
                hint='the operator installs it: pip install "turnwise[gym]"',
            ) from exc
        environment: Environment = getattr(module, self.function)(argument, config, reach)
        return environment


def _import(name: str) -> Any:
    return import_module(f"task_app.environments.foreign.{name}")


FOREIGN: Mapping[str, ForeignKind] = {
    "gymnasium": ForeignKind("GymnasiumConfig", "gymnasium_peer", "gymnasium_environment"),
    "mcp": ForeignKind("McpConfig", "mcp_peer", "mcp_environment"),
    "openenv": ForeignKind("OpenEnvConfig", "openenv_peer", "openenv_environment"),
    "reasoning_gym": ForeignKind("ReasoningGymConfig", "library_peer", "replayable_environment"),
    "textarena": ForeignKind("TextArenaConfig", "library_peer", "replayable_environment"),
    "verifiers": ForeignKind("VerifiersConfig", "library_peer", "verifiers_environment"),
}


def find_kind(env_name: str) -> tuple[ForeignKind, str] | None:
    """Return the kind that the prefix of `env_name` names, and the text after the colon.

    Returns None if `env_name` has no known prefix.
    """
    prefix, colon, argument = env_name.partition(":")
    return (FOREIGN[prefix], argument) if colon and prefix in FOREIGN else None
