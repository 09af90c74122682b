"""Reads the operator's file of MCP servers, which has the form that most MCP clients use:

{"mcpServers": {"files": {"command": "npx", "args": ["server-files"], "env": {"LEVEL": "1"}},
                "far": {"url": "https://far.example/mcp", "headers": {"Authorization": "Bearer …"}}}}
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, ConfigDict, Field, ValidationError

from shared_schemas.base import OpenBody
from shared_schemas.json_text import read_json
from shared_schemas.urls import split_http


def _http(url: str) -> str:
    """Return `url`. Raises ValueError if it is not an http or https URL with a host.

    The error does not quote `url`, because its path may contain a key.
    """
    if not (url.isascii() and url.isprintable() and " " not in url and split_http(url)):
        raise ValueError("it is no http or https URL with a host")
    return url


_Url = Annotated[str, AfterValidator(_http)]
# The headers that httpx accepts; httpx's own error would contain the value.
_HeaderName = Annotated[str, Field(pattern=r"^[!#$%&'*+.^_`|~0-9A-Za-z-]+$")]
_HeaderValue = Annotated[str, Field(pattern=r"^([!-~]([ -~]*[!-~])?)?$")]


class McpServer(OpenBody):
    """A server of the file. Unknown keys, such as another client's `autoApprove`, are ignored."""

    model_config = ConfigDict(extra="ignore")

    command: str | None = Field(default=None, min_length=1)
    """The program, which is started without a shell."""
    args: tuple[str, ...] = Field(default=(), repr=False)
    env: dict[str, str] = Field(default_factory=dict, repr=False)
    """Environment variables, in addition to those that `without_keys` copies from the task app."""
    cwd: str | None = None
    """Working directory of the process; None means that of the task app."""
    url: _Url | None = Field(default=None, repr=False)
    """Address of a remote server; ignored if there is a command."""
    headers: dict[_HeaderName, _HeaderValue] = Field(default_factory=dict, repr=False)
    """Headers of every request to a remote server. A variable such as `${KEY}` in them is not replaced."""
    type: str | None = None
    """The transport of a remote server."""
    disabled: bool = False

    @property
    def why_not(self) -> str:
        """Why the server cannot be used, as the predicate of a sentence; empty if it can be used."""
        if self.disabled:
            return "is disabled"
        if self.command is not None:
            return ""
        if self.url is None:
            return "has neither a command nor a url"
        return "speaks sse, which is older than streamable HTTP" if self.type == "sse" else ""


class _File(OpenBody):
    servers: dict[str, McpServer] = Field(alias="mcpServers")


def read_servers(value: Any) -> Any:
    """If `value` is a path, read that file and return its servers by name; else return `value` unchanged.

    Raises:
        ValueError: the file cannot be read, or does not have the expected form.
    """
    if not isinstance(value, str | Path):
        return value
    try:
        return _File.model_validate(read_json(Path(value).read_bytes())).servers
    except OSError as exc:
        raise ValueError(f"the file cannot be read: {exc.strerror}") from exc
    except ValidationError as exc:
        error = exc.errors(include_url=False)[0]
        # The message omits an invalid header name, because it may be a whole header with a secret.
        place = ".".join(map(str, error["loc"])).partition(".headers.")
        raise ValueError(
            f"{''.join(place[:2]).rstrip('.')}: {error['msg']}; the file has the form "
            '{"mcpServers": {"NAME": {"command": "PROGRAM", "args": []}}}, or {"url": …, "headers": {}}'
        ) from exc


Servers = Mapping[str, McpServer]
