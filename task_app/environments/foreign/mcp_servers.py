"""The operator's file of MCP servers, in the form that MCP's clients share:

{"mcpServers": {"files": {"command": "npx", "args": ["server-files"], "env": {"LEVEL": "1"}},
                "far": {"url": "https://far.example/mcp", "headers": {"Authorization": "Bearer …"}}}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Self
from urllib.parse import urlsplit

from pydantic import Field, ValidationError, model_validator

from shared_schemas.base import OpenBody
from shared_schemas.json_text import read_json
from shared_schemas.urls import is_http

# What httpx sends; an error of its own would tell the value.
_HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
_HeaderValue = Annotated[str, Field(pattern=r"^([!-~]([ -~]*[!-~])?)?$")]


class McpServer(OpenBody):
    """A server of the file. Keys that only other clients read (`disabled`, `autoApprove`) are ignored.

    Attributes:
        command: the program; no shell reads it.
        env: its further environment variables, by value. Of the task app's own it gets those that hold no
            keys.
        cwd: where it runs; None: where the task app does.
        url: of a remote server; not read beside a command.
        headers: of every request to it.
    """

    command: str | None = Field(default=None, min_length=1)
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    cwd: str | None = None
    url: str | None = Field(default=None, repr=False)  # its path may be a key
    headers: dict[_HeaderName, _HeaderValue] = Field(default_factory=dict, repr=False)

    @model_validator(mode="after")
    def _is_reachable(self) -> Self:
        if self.command is not None:
            return self
        if self.url is None:
            raise ValueError("it has neither a command nor a url")
        if not is_http(urlsplit(self.url)):
            raise ValueError("its url is no http or https URL with a host")
        return self


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
            '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": []}}}, or {"url": …, "headers": {}}'
        ) from exc


Servers = Mapping[str, McpServer]
