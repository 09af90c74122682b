"""Chat messages and tools in OpenAI's form, and checks of message lists."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import OpenBody, shown

# An opening has no tool results, because no tool was called yet.
OPENING_ROLES = ("system", "user", "assistant")
ROLES = (*OPENING_ROLES, "tool")


class FunctionCall(OpenBody):
    name: str
    arguments: str = Field(description="JSON text of the arguments object, as the model wrote it")


class ToolCall(OpenBody):
    id: str
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(OpenBody):
    """One chat message. It is frozen, so that an observation which contains the message cannot change."""

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


def refuse_no_opening(value: Any, name: str) -> None:
    """Raise ValueError unless a value can open an episode: a text, or messages ending with a user message.

    Only a message with tool calls may be empty. `name` is the value's column or key, for the error.
    """
    if isinstance(value, str) and value.strip():
        return
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} is {shown(value)}; it is a text or a list of messages, and not empty")
    for place, item in enumerate(value):
        role, content = _role_and_content(item, f"{name}[{place}]", OPENING_ROLES)
        calls = role == "assistant" and dict(item).get("tool_calls")
        if not calls and (not isinstance(content, str) or not content.strip()):
            raise ValueError(f"{name}[{place}].content is {shown(content)}; it is a text that is not empty")
    if role != "user":
        raise ValueError(f"{name} ends with a message of {role!r}; the last is the user's")


def dialogue_opening(prompt: tuple[Message, ...] | str, system: str = "") -> tuple[Message, ...]:
    """Return the first prompt of the environment `dialogue`.

    A `prompt` that is a text becomes the user's message, after the system message `system` (if not empty).
    """
    if not isinstance(prompt, str):
        return prompt
    first = (Message(role="system", content=system),) if system else ()
    return (*first, Message(role="user", content=prompt))


def refuse_unanswerable(value: Any, name: str) -> None:
    """Raise ValueError unless an interaction can answer the messages: the last is an assistant message.

    Its content may be empty or None, because the interaction scores such an answer like any other.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} is {shown(value)}; it is a list of messages, and not empty")
    for place, item in enumerate(value):
        role, content = _role_and_content(item, f"{name}[{place}]", ROLES)
        if not isinstance(content, str) and (role, content) != ("assistant", None):
            raise ValueError(f"{name}[{place}].content is {shown(content)}; it is a text")
    if role != "assistant":
        expected = "the last is the assistant's, which is what is answered"
        raise ValueError(f"{name} ends with a message of {role!r}; {expected}")


def _role_and_content(item: Any, name: str, known: Sequence[str]) -> tuple[Any, Any]:
    if not isinstance(item, Mapping | Message):
        raise ValueError(f"{name} is {shown(item)}; a message has role and content")
    fields = dict(item)
    role = fields.get("role")
    if role not in known:
        raise ValueError(f"{name}.role is {shown(role)}; known: {', '.join(known)}")
    return role, fields.get("content")
