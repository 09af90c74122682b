"""The dialect of OpenAI Responses for captures.

Responses are not stored, so each call must contain the whole conversation.
"""

from collections.abc import Iterable
from typing import Any

from shared_schemas.chat import openai_error
from shared_schemas.messages import Message, ToolSpec
from task_app.captures.calls import (
    Answer,
    Call,
    Event,
    Item,
    Json,
    Keys,
    append_calls,
    objects,
    tool_call,
    tool_spec,
)
from task_app.errors import InvalidRequest, clipped

_TEXT = ("input_text", "output_text", "text", "refusal")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}


class Responses:
    """Reads and answers POST .../v1/responses."""

    def read(self, body: Json) -> Call:
        keys = Keys(body)
        whole = "send the whole input in each call"
        keys.refuse("previous_response_id", (), whole)
        keys.refuse("conversation", (), whole)
        keys.refuse("background", (False,), "wait for the answer")
        keys.form_in("text")
        keys.skip("user", "metadata", "store", "include", "safety_identifier", "prompt_cache_key",
                  "stream_options", "truncation", "service_tier")  # fmt: skip
        messages = _read_messages(keys.take("instructions", str, ""), keys.take("input", (str, list), []))
        return keys.call(messages, _read_tool, max_tokens=keys.max_tokens("max_output_tokens"))

    def body(self, answer: Answer, call: Call) -> Json:
        is_cut = answer.finish_reason == "length"
        prompt, completion = answer.prompt_tokens, answer.completion_tokens
        return {
            **_frame(answer, call),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": _make_items(answer),
            "usage": {
                "input_tokens": prompt,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": completion,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": prompt + completion,
            },
        }

    def events(self, answer: Answer, call: Call) -> Iterable[Event]:
        whole = self.body(answer, call)
        start = {**whole, "status": "in_progress", "output": [], "usage": None, "incomplete_details": None}
        parts: list[tuple[str, Json]] = [
            ("response.created", {"response": start}),
            ("response.in_progress", {"response": start}),
        ]
        for index, item in enumerate(whole["output"]):
            parts += _item_events(item, index)
        end = "response.incomplete" if whole["status"] == "incomplete" else "response.completed"
        parts.append((end, {"response": whole}))
        for number, (name, data) in enumerate(parts):
            yield name, {"type": name, "sequence_number": number, **data}

    def count(self, tokens: int) -> Json:
        return {"object": "response.input_tokens", "input_tokens": tokens}

    def error(self, status: int, code: str, sentence: str, where: str | None) -> Json:
        return {"error": openai_error(sentence, status=status, code=code, where=where)}


def _read_messages(instructions: str, text_or_items: str | list[Any]) -> tuple[Message, ...]:
    is_text = isinstance(text_or_items, str)
    items = [{"role": "user", "content": text_or_items}] if is_text else text_or_items
    messages: list[Message] = []
    for item in objects(items, "input"):
        _add_item(messages, item)
    if not messages:
        raise InvalidRequest("input holds no message", where="input")
    system = [Message(role="system", content=instructions)] if instructions else []
    return (*system, *messages)


def _add_item(messages: list[Message], item: Item) -> None:
    """Append an input item as a message. Successive items of the assistant become one message."""
    kind = item.get("type", "message")
    if kind == "reasoning":
        return
    if kind == "function_call":
        append_calls(messages, [tool_call(*map(item.text, ("call_id", "name", "arguments")))])
        return
    if kind == "function_call_output":
        text, call_id = item.content("output", _TEXT), item.text("call_id", default="")
        messages.append(Message(role="tool", content=text, tool_call_id=call_id))
        return
    if kind != "message":
        raise item.refusal("type", f"is {clipped(repr(kind))}, which is not offered here")
    role, text = item.role(_ROLES), item.content("content", _TEXT)
    if role == "assistant" and messages and messages[-1].role == "assistant":
        append_calls(messages, [], text)
    else:
        messages.append(Message(role=role, content=text))


def _read_tool(item: Item) -> ToolSpec:
    if (kind := item.get("type")) != "function":
        raise item.refusal("type", f"is {clipped(repr(kind))}; only functions are offered here")
    return tool_spec(item, "parameters")


def _frame(answer: Answer, call: Call) -> Json:
    tools = [{"type": "function", "strict": False, **tool.function.model_dump()} for tool in call.tools]
    return {
        "id": f"resp_{answer.call_id}", "object": "response", "created_at": answer.created, "error": None,
        "instructions": None, "metadata": {}, "model": answer.model, "parallel_tool_calls": True,
        "temperature": None, "top_p": None, "tool_choice": "auto", "tools": tools,
    }  # fmt: skip


def _make_items(answer: Answer) -> list[Json]:
    items: list[Json] = []
    if answer.text or not answer.tool_calls:
        part = {"type": "output_text", "text": answer.text, "annotations": []}
        items.append(
            {"type": "message", "id": f"msg_{answer.call_id}", "role": "assistant", "status": "completed",
             "content": [part]}
        )  # fmt: skip
    for index, call in enumerate(answer.tool_calls):
        items.append(
            {"type": "function_call", "id": f"fc_{answer.call_id}_{index}", "call_id": call.id,
             "name": call.function.name, "arguments": call.function.arguments, "status": "completed"}
        )  # fmt: skip
    return items


def _item_events(item: Json, index: int) -> list[tuple[str, Json]]:
    spot = {"item_id": item["id"], "output_index": index}
    if item["type"] == "function_call":
        start, text = {**item, "arguments": "", "status": "in_progress"}, item["arguments"]
        named = "response.function_call_arguments"
        middle = [
            (f"{named}.delta", {**spot, "delta": text}),
            (f"{named}.done", {**spot, "arguments": text, "name": item["name"]}),
        ]
    else:
        start, (part,) = {**item, "content": [], "status": "in_progress"}, item["content"]
        spot, text = {**spot, "content_index": 0}, part["text"]
        middle = [
            ("response.content_part.added", {**spot, "part": {**part, "text": ""}}),
            ("response.output_text.delta", {**spot, "delta": text, "logprobs": []}),
            ("response.output_text.done", {**spot, "text": text, "logprobs": []}),
            ("response.content_part.done", {**spot, "part": part}),
        ]
    return [
        ("response.output_item.added", {"output_index": index, "item": start}),
        *middle,
        ("response.output_item.done", {"output_index": index, "item": item}),
    ]
