"""Pure: the answers of model calls as /openapi.json declares them, with the fields that clients read.

They are open, because the dialects belong to OpenAI and Anthropic, whose own documents say the rest.
"""

from typing import Annotated, Literal

from pydantic import Field

from shared_schemas.base import OpenReply
from shared_schemas.messages import ToolCall


class ChatMessage(OpenReply):
    role: str
    content: str | None
    tool_calls: tuple[ToolCall, ...] = ()


class ChatChoice(OpenReply):
    index: int
    message: ChatMessage
    finish_reason: str


class ChatUsage(OpenReply):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class ChatCompletion(OpenReply):
    """OpenAI's answer of Chat Completions."""

    id: str
    object: str
    created: int
    model: str
    choices: tuple[ChatChoice, ...]
    usage: ChatUsage


class OutputText(OpenReply):
    type: Literal["output_text"]
    text: str


class OutputMessage(OpenReply):
    type: Literal["message"]
    id: str
    role: str
    status: str
    content: tuple[OutputText, ...]


class OutputCall(OpenReply):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: str


class ResponseUsage(OpenReply):
    input_tokens: int
    output_tokens: int
    total_tokens: int


class ModelResponse(OpenReply):
    """OpenAI's answer of Responses."""

    id: str
    object: str
    created_at: int
    model: str
    status: str
    output: tuple[Annotated[OutputMessage | OutputCall, Field(discriminator="type")], ...]
    usage: ResponseUsage


class InputTokens(OpenReply):
    """The tokens of a prompt, for OpenAI's clients."""

    object: str
    input_tokens: int


class OpenAIFault(OpenReply):
    message: str
    type: str
    param: str | None
    code: str


class OpenAIRefusal(OpenReply):
    """A refusal as OpenAI's clients read it."""

    error: OpenAIFault


class TextBlock(OpenReply):
    type: Literal["text"]
    text: str


class ToolUseBlock(OpenReply):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, object]


class MessageUsage(OpenReply):
    input_tokens: int
    output_tokens: int


class AnthropicMessage(OpenReply):
    """Anthropic's answer of Messages."""

    id: str
    type: str
    role: str
    model: str
    content: tuple[Annotated[TextBlock | ToolUseBlock, Field(discriminator="type")], ...]
    stop_reason: str
    stop_sequence: str | None
    usage: MessageUsage


class MessageTokens(OpenReply):
    """The tokens of a prompt, for Anthropic's clients."""

    input_tokens: int


class AnthropicFault(OpenReply):
    type: str
    message: str


class AnthropicRefusal(OpenReply):
    """A refusal as Anthropic's clients read it."""

    type: str
    error: AnthropicFault
