"""The dialect of Anthropic Messages for captures."""

from collections.abc import Iterable

from pydantic_core import to_json

from shared_schemas.chat import CONTEXT_LENGTH_EXCEEDED
from shared_schemas.messages import Message, ToolSpec
from task_app.captures.calls import (
    Answer,
    Call,
    Event,
    Item,
    Json,
    Keys,
    append_calls,
    arguments_object,
    objects,
    parts_text,
    tool_call,
    tool_spec,
)
from task_app.errors import clipped

_TEXT = ("text",)
_ROLES = {"assistant": "assistant", "user": "user"}
_UNSHOWN = ("thinking", "redacted_thinking")
_STOP = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use"}
# Key that names a conversation stored by the server. If the key is refused with `_NO_THREAD`, Anthropic's
# library sends all messages.
_THREAD = "thread"
_NO_THREAD = {"error_code": "thread_unsupported_request", "unsupported": []}
_ERRORS = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


class AnthropicMessages:
    """Reads and answers POST .../v1/messages."""

    def read(self, body: Json) -> Call:
        keys = Keys(body)
        items = keys.messages()
        system = parts_text(keys.take("system", (str, list)), _TEXT, where="system")
        messages = [Message(role="system", content=system)] if system else []
        for item in items:
            _add_message(messages, item)
        keys.skip("metadata", "service_tier")
        keys.refuse(_THREAD, (), "send the whole conversation in each call")
        keys.form_in("output_config")
        keys.form(keys.take("output_format", dict), "output_format")  # the beta's name
        limit, stop = keys.max_tokens("max_tokens"), keys.stop("stop_sequences")
        return keys.call(messages, _read_tool, max_tokens=limit, stop=stop)

    def body(self, answer: Answer, call: Call) -> Json:
        content: list[Json] = [{"type": "text", "text": answer.text}] if answer.text else []
        content += [
            {"type": "tool_use", "id": one.id, "name": one.function.name, "input": arguments_object(one)}
            for one in answer.tool_calls
        ]
        return {
            "id": f"msg_{answer.call_id}",
            "type": "message",
            "role": "assistant",
            "model": answer.model,
            "content": content,
            "stop_reason": _STOP[answer.finish_reason],
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, answer: Answer, call: Call) -> Iterable[Event]:
        whole = self.body(answer, call)
        start = {**whole, "content": [], "stop_reason": None, "usage": {**whole["usage"], "output_tokens": 0}}
        parts: list[tuple[str, Json]] = [("message_start", {"message": start})]
        for place, block in enumerate(whole["content"]):
            if block["type"] == "text":
                empty, delta = {**block, "text": ""}, {"type": "text_delta", "text": block["text"]}
            else:
                empty = {**block, "input": {}}
                delta = {"type": "input_json_delta", "partial_json": to_json(block["input"]).decode()}
            parts += [
                ("content_block_start", {"index": place, "content_block": empty}),
                ("content_block_delta", {"index": place, "delta": delta}),
                ("content_block_stop", {"index": place}),
            ]
        end = {"stop_reason": whole["stop_reason"], "stop_sequence": None}
        parts += [("message_delta", {"delta": end, "usage": whole["usage"]}), ("message_stop", {})]
        for name, data in parts:
            yield name, {"type": name, **data}

    def count(self, tokens: int) -> Json:
        return {"input_tokens": tokens}

    def error(self, status: int, code: str, sentence: str, where: str | None) -> Json:
        kind = _ERRORS.get(status, "invalid_request_error" if status < 500 else "api_error")
        # Client libraries recognise these words, which are the API's own, and retry with a shorter prompt.
        reason = "prompt is too long" if code == CONTEXT_LENGTH_EXCEEDED else code
        error: Json = {"type": kind, "message": f"{reason}: {sentence}"}
        if where == _THREAD:
            error["details"] = _NO_THREAD
        return {"type": "error", "error": error}


def _add_message(messages: list[Message], item: Item) -> None:
    """Append a message. Tool results inside a user's message become separate messages before it."""
    role, content = item.role(_ROLES), item.get("content")
    if isinstance(content, str):
        messages.append(Message(role=role, content=content))
        return
    blocks = objects(content, f"{item.where}.content")
    if role == "user" and not blocks:
        raise item.refusal("content", "is empty")
    texts, calls = [], []
    for block in blocks:
        kind = block.get("type")
        if kind == "tool_use" and role == "assistant":
            arguments = to_json(block.part("input", dict, "an object")).decode()
            calls.append(tool_call(block.text("id"), block.text("name"), arguments))
        elif kind == "tool_result" and role == "user":
            text, call_id = block.content("content", _TEXT), block.text("tool_use_id", default="")
            messages.append(Message(role="tool", content=text, tool_call_id=call_id))
        elif role == "user" or kind not in _UNSHOWN:
            texts.append(block.part_text(_TEXT))
    if role == "assistant":
        messages.append(Message(role="assistant", content=""))
        append_calls(messages, calls, "".join(texts))
    elif texts:
        messages.append(Message(role="user", content="".join(texts)))


def _read_tool(item: Item) -> ToolSpec:
    if item.get("type", "custom") != "custom":
        raise item.refusal("type", f"is {clipped(repr(item.get('type')))}; only custom is offered")
    return tool_spec(item, "input_schema")
