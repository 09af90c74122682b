"""Chat messages and tools, in the OpenAI chat-completions form."""

from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import OpenBody


class FunctionCall(OpenBody):
    name: str
    arguments: str = Field(description="JSON text of the arguments object, as the model wrote it")


class ToolCall(OpenBody):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(OpenBody):
    """One chat message. Frozen: an observation that holds it can never change afterwards."""

    role: str
    content: str | None = ""
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: tuple[ToolCall, ...] | None = None


class FunctionSpec(OpenBody):
    name: str
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=dict, description="JSON Schema of the arguments")


class ToolSpec(OpenBody):
    type: Literal["function"] = "function"
    function: FunctionSpec
