"""Writes JSON values as text for a model, and reads the tools and results of MCP and OpenEnv servers."""

import json
from collections.abc import Mapping
from typing import Any

from pydantic import AliasChoices, Field, JsonValue

from service_kit.replies import Model, ReplyInvalid, read_value
from shared_schemas.base import StrictReply
from shared_schemas.messages import ToolSpec
from task_app.environments.foreign.peer import ForeignFailed
from task_app.environments.foreign.schemas import tool


def render_text(data: Any) -> str:
    """Write JSON values as text, with one line per member of an object.

    Floats have four significant digits. A list of lists has one line per row.
    """
    if isinstance(data, Mapping):
        return "\n".join(f"{name}: {_render_value(value)}" for name, value in data.items())
    return _render_value(data)


def _render_value(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, list) and data and all(isinstance(row, list) for row in data):
        return "\n" + "\n".join(map(_render_row, data))
    return _render_row(data)


def _render_row(data: Any) -> str:
    if isinstance(data, float):
        return f"{data:.4g}"
    if isinstance(data, list) and all(isinstance(value, int | float | list) for value in data):
        return f"[{', '.join(map(_render_row, data))}]"
    return json.dumps(data, ensure_ascii=False)


class _Tool(StrictReply):
    """A tool as MCP or OpenEnv describes it. OpenEnv calls the schema `input_schema`."""

    name: str = Field(min_length=1)
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(
        default=None, validation_alias=AliasChoices("inputSchema", "input_schema")
    )


class _Part(StrictReply):
    text: str | None = None


class _Content(StrictReply):
    """A tool's result as MCP describes it."""

    content: list[_Part] | None = None
    structuredContent: dict[str, JsonValue] | None = None
    data: JsonValue = None
    """OpenEnv's name for `structuredContent`."""


def mcp_tool(described: Any, name: str) -> ToolSpec:
    read = typed(_Tool, described, f"{name}, one of the tools")
    return tool(read.name, read.description or "", read.schema_ or {}, of=name)


def result_text(result: Any, name: str) -> str:
    """Return the text of a tool's MCP result: its text parts, or else its structured content as text."""
    if not isinstance(result, dict):
        return render_text(result)
    read = typed(_Content, result, f"{name}, the answer to tools/call")
    texts = [part.text for part in read.content or () if part.text is not None]
    if texts:
        return "\n".join(texts)
    plain = read.data if read.structuredContent is None else read.structuredContent
    return render_text(result if plain is None else plain)


def typed(kind: type[Model], value: Any, part: str) -> Model:
    """Validate `value` as a `kind`. Raises ForeignFailed if it is invalid; `part` begins the error."""
    try:
        return read_value(kind, value, part)
    except ReplyInvalid as exc:
        raise ForeignFailed(str(exc), unquoted=f"{part}: a field is wrong; {exc.allowed}") from exc
