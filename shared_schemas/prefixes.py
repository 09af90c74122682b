"""The prefixes of `env_name` for environments of other libraries and servers, as in `gymnasium:ID`.

`task_app/environments/foreign/kinds.py` builds these environments, and a test compares the names. Jobs, pages
and errors use this table.
"""

from collections.abc import Mapping
from dataclasses import dataclass

# Pattern of a module's name.
MODULE = r"^[A-Za-z_][A-Za-z0-9_.-]*$"


@dataclass(frozen=True, slots=True)
class Prefix:
    """Describes the environments whose names begin with one prefix."""

    argument: str
    """What follows the colon in a name, such as `ID` or `URL`."""
    plays: str
    """What such a name stands for."""
    how: str
    """How an operator, or a job that starts its own task app, allows more environments of this kind."""
    draws: bool = False
    """Whether an environment of this kind may be able to draw pictures of its states."""


def _place(variable: str, key: str) -> str:
    return f"in {variable} of the task app, or, if the job starts its own task app, in services.{key}"


def _python(library: str) -> str:
    place = _place(
        f"TURNWISE_{library.upper()}_PYTHON=/path/bin/python", f'{library}_python = "/path/bin/python"'
    )
    return f"name a Python that has the library {place}"


def _modules(library: str) -> str:
    place = _place(f"TURNWISE_{library.upper()}_MODULES=module,...", f'{library}_modules = ["module"]')
    return f"list modules that may be imported {place}"


_HOSTS = "list hosts beyond this machine " + _place(
    "TURNWISE_ALLOWED_ENVIRONMENT_HOSTS=host,...", 'allowed_environment_hosts = ["host"]'
)
PREFIXES: Mapping[str, Prefix] = {
    "gymnasium": Prefix(
        "ID",
        "an environment that is registered with gymnasium",
        f"{_modules('gymnasium')}; gymnasium:MODULE:ID names one of them too",
        draws=True,
    ),
    "mcp": Prefix(
        "URL or NAME",
        "the tools of an MCP server",
        f"name the file of MCP servers {_place('TURNWISE_MCP_SERVERS', 'mcp_servers')}; {_HOSTS}",
    ),
    "openenv": Prefix("URL", "an OpenEnv server", _HOSTS),
    "reasoning_gym": Prefix("NAME", "a data set of reasoning-gym", _python("reasoning_gym")),
    "textarena": Prefix("ID", "a game of TextArena for one player", _python("textarena")),
    "verifiers": Prefix(
        "MODULE", "a taskset of verifiers", f"{_modules('verifiers')}; {_python('verifiers')}"
    ),
}


def list_prefixes() -> str:
    """Return a text that lists all prefixes: `gymnasium:ID, mcp:URL, ...`."""
    return ", ".join(f"{name}:{prefix.argument.partition(' ')[0]}" for name, prefix in PREFIXES.items())
