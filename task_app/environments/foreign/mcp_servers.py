"""The operator's file of MCP servers that start as processes, in the form that MCP's clients share:

{"mcpServers": {"files": {"command": "npx", "args": ["server-files"], "env": {"LEVEL": "1"}}}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from shared_schemas.base import OpenBody
from shared_schemas.json_text import read_json


class McpServer(OpenBody):
    """A server of the file. Keys that only other clients read (`disabled`, `autoApprove`) are ignored.

    Attributes:
        command: the program; no shell reads it.
        env: its further environment variables, by value. Of the task app's own it gets those that hold no
            keys.
        cwd: where it runs; None: where the task app does.
        url: of a remote server, which has no command.
    """

    command: str | None = Field(default=None, min_length=1)
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = None


class _File(OpenBody):
    servers: dict[str, McpServer] = Field(alias="mcpServers")


def read_servers(value: Any) -> Any:
    """The servers of a file, by name; what is no path stays as it is.

    Raises:
        ValueError: it cannot be read, or has another form.
    """
    if not isinstance(value, str | Path):
        return value
    if value == "":  # a variable of compose that nobody set
        return {}
    try:
        return _File.model_validate(read_json(Path(value).read_bytes())).servers
    except OSError as exc:
        raise ValueError(f"the file cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        place = ".".join(map(str, error["loc"]))
        raise ValueError(
            f"{place}: {error['msg']}; the file has the form "
            '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": []}}}'
        ) from exc


Servers = Mapping[str, McpServer]
