"""Messages and tools to token ids, and ids back to text: the only place that knows a chat template."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import PreTrainedTokenizerFast

from trainer_backend.errors import BadChatRequest, ModelFolderError

JsonObject = Mapping[str, Any]


class ChatRenderer:
    """Renders through the tokenizer's own chat template, which `transformers` compiles once."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        if not tokenizer.chat_template:
            raise ModelFolderError("the tokenizer has no chat template", where="tokenizer_config.json")
        self.tokenizer = tokenizer
        # The library's wrapper around it costs ten times the call itself when decoding six tokens.
        self._backend = tokenizer.backend_tokenizer

    def prompt_text(
        self,
        messages: Sequence[JsonObject],
        tools: Sequence[JsonObject],
        *,
        add_generation_prompt: bool = True,
    ) -> str:
        """The text that the model continues.

        Raises:
            BadChatRequest: a message has a shape that this template cannot render.
        """
        plain = [plain_message(message, where=f"messages.{i}") for i, message in enumerate(messages)]
        # Templates are programs of others: whatever one raises means that it cannot render these messages.
        try:
            text = self.tokenizer.apply_chat_template(
                plain,
                tools=[dict(tool) for tool in tools] or None,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
            )
        except Exception as error:
            raise BadChatRequest(
                f"the chat template cannot render this: {error}", where="messages"
            ) from error
        return str(text)

    def encode(self, text: str) -> list[int]:
        """The ids of rendered text; special tokens written in it count as such, none are added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of sampled ids, special tokens included."""
        text: str = self._backend.decode(list(ids), skip_special_tokens=False)
        return text


def plain_message(message: JsonObject, *, where: str) -> dict[str, Any]:
    """A message as templates expect it: text content, and call arguments as an object where they are one.

    Raises:
        BadChatRequest: no role; content that is neither text, a list of text parts, nor null; a broken call.
    """
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str):
        raise BadChatRequest("a message needs a role", where=f"{where}.role")
    plain = {**message, "content": _text(content, where=f"{where}.content")}
    calls = message.get("tool_calls")
    if calls is not None and not isinstance(calls, list | tuple):
        raise BadChatRequest("tool_calls must be a list", where=f"{where}.tool_calls")
    if calls:
        plain["tool_calls"] = [
            _plain_call(call, where=f"{where}.tool_calls.{i}") for i, call in enumerate(calls)
        ]
    return plain


def _text(content: object, *, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and all(
        isinstance(part, dict) and part.get("type") == "text" for part in content
    ):
        return "".join(str(part.get("text", "")) for part in content)
    raise BadChatRequest("content must be text, a list of text parts, or null", where=where)


def _plain_call(call: object, *, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if (
        not isinstance(call, dict)
        or not isinstance(function, dict)
        or not isinstance(function.get("name"), str)
    ):
        raise BadChatRequest('a tool call is {"id", "type", "function": {"name", "arguments"}}', where=where)
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"))}}


def _arguments(arguments: object) -> object:
    """Arguments arrive as JSON text; templates print objects. Text that is no object stays as it is."""
    if not isinstance(arguments, str):
        return arguments
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
