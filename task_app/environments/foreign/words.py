"""Plain values as text for a model, and tools and results as MCP and OpenEnv describe them."""

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
    """A line for each member of an object; numbers with four digits, a matrix row by row."""
    if isinstance(data, Mapping):
        return "\n".join(f"{name}: {_value(one)}" for name, one in data.items())
    return _value(data)


def _value(data: Any) -> str:
    if isinstance(data, str):
        return data
    if isinstance(data, list):
        is_matrix = bool(data) and all(isinstance(row, list) for row in data)
        return "\n" + "\n".join(map(_row, data)) if is_matrix else _row(data)
    return _row(data)


def _row(data: Any) -> str:
    if isinstance(data, float):
        return f"{data:.4g}"
    if isinstance(data, list) and all(isinstance(one, int | float | list) for one in data):
        return f"[{', '.join(map(_row, data))}]"
    return json.dumps(data, ensure_ascii=False)


class _Tool(StrictReply):
    """A tool as MCP describes it; OpenEnv spells its schema `input_schema`."""

    name: str = Field(min_length=1)
    description: str | None = None
    schema_: dict[str, JsonValue] | None = Field(
        default=None, validation_alias=AliasChoices("inputSchema", "input_schema")
    )


class _Part(StrictReply):
    text: str | None = None


class _Content(StrictReply):
    """The text of a tool's result in MCP's form; a result without texts is shown as its plain value."""

    content: list[_Part] | None = None
    structuredContent: dict[str, JsonValue] | None = None
    data: JsonValue = None
    """As OpenEnv spells it."""


def mcp_tool(described: Any, name: str) -> ToolSpec:
    """A tool of the foreign side of that name."""
    one = typed(_Tool, described, f"{name}, one of the tools")
    return tool(one.name, one.description or "", one.schema_ or {}, of=name)


def result_text(result: Any, name: str) -> str:
    """The text of a tool's result in MCP's form: its content, or else its plain value."""
    if not isinstance(result, dict):
        return render_text(result)
    told = typed(_Content, result, f"{name}, the answer to tools/call")
    texts = [part.text for part in told.content or () if part.text is not None]
    if texts:
        return "\n".join(texts)
    plain = told.data if told.structuredContent is None else told.structuredContent
    return render_text(result if plain is None else plain)


def typed(kind: type[Model], value: Any, part: str) -> Model:
    """Read a value with `read_value`; a wrong one is a ForeignFailed."""
    try:
        return read_value(kind, value, part)
    except ReplyInvalid as exc:
        raise ForeignFailed(str(exc), unquoted=f"{part}: a field is wrong; {exc.allowed}") from exc
