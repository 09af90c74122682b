"""Tools and results as MCP describes them; OpenEnv's servers use the same forms."""

from typing import Any

from shared_schemas.messages import ToolSpec
from task_app.environments.foreign.peer import ForeignFailed
from task_app.environments.foreign.schemas import tool
from task_app.environments.foreign.words import text_of
from task_app.errors import clipped


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
