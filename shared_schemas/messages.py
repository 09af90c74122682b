"""Chat messages and tools, in the OpenAI chat-completions form, and what is one."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field

from shared_schemas.base import OpenBody, shown

# Before the first answer no tool has been called yet.
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


def refuse_no_opening(value: Any, name: str) -> None:
    """What an episode opens with: a text, or messages of which the last is the user's; none is empty.

    Args:
        value: as it came, before it is read.
        name: of the column or key, the beginning of the error.

    Raises:
        ValueError: says which message is wrong, what was found and what is allowed.
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


def refuse_unanswerable(value: Any, name: str) -> None:
    """What an interaction answers: messages of which the last is the assistant's; else as above.

    An answer may be empty, and of calls alone its content is None: both are the model's, and are scored.
    """
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(f"{name} is {shown(value)}; it is a list of messages, and not empty")
    for place, item in enumerate(value):
        role, content = _role_and_content(item, f"{name}[{place}]", ROLES)
        if not isinstance(content, str) and (role, content) != ("assistant", None):
            raise ValueError(f"{name}[{place}].content is {shown(content)}; it is a text")
    if role != "assistant":
        told = "the last is the assistant's, which is what is answered"
        raise ValueError(f"{name} ends with a message of {role!r}; {told}")


def _role_and_content(item: Any, name: str, known: Sequence[str]) -> tuple[Any, Any]:
    if not isinstance(item, Mapping | Message):
        raise ValueError(f"{name} is {shown(item)}; a message has role and content")
    said = dict(item)
    role = said.get("role")
    if role not in known:
        raise ValueError(f"{name}.role is {shown(role)}; known: {', '.join(known)}")
    return role, said.get("content")
