"""Plain values as text for a model, and tools and results as MCP and OpenEnv describe them."""

import json
from collections.abc import Mapping
from typing import Any

from shared_schemas.messages import ToolSpec
from task_app.environments.foreign.peer import ForeignFailed
from task_app.environments.foreign.schemas import tool
from task_app.errors import clipped


def text_of(data: Any) -> str:
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


def mcp_tool(described: Any) -> ToolSpec:
    """A tool as MCP describes it; OpenEnv spells its schema `input_schema`."""
    described = object_in(described, "a tool")
    schema = described.get("inputSchema") or described.get("input_schema") or {}
    return tool(
        str(described.get("name")), described.get("description") or "", object_in(schema, "a tool's schema")
    )


def result_text(result: Any) -> str:
    """The text of a tool's result in MCP's form: its content, or else its plain value."""
    if not isinstance(result, dict):
        return text_of(result)
    parts = result.get("content")
    if not isinstance(parts, list):
        parts = []
    texts = [str(part["text"]) for part in parts if isinstance(part, dict) and "text" in part]
    if texts:
        return "\n".join(texts)
    return text_of(result.get("structuredContent", result.get("data", result)))


def number(value: Any, name: str) -> float:
    """A reward; null is 0."""
    if value is None:
        return 0.0
    if not isinstance(value, int | float):
        raise ForeignFailed(
            f"{name} pays a reward of {clipped(str(value))!r}, which is no number",
            unquoted=f"{name} pays a reward that is no number",
        )
    return float(value)


def object_in(value: Any, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        fault = f"{what} is no JSON object"
        raise ForeignFailed(f"{fault}: {clipped(str(value), 200)}", unquoted=fault)
    return value
