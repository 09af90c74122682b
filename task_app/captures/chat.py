"""The dialect of OpenAI Chat Completions for captures."""

from collections.abc import Iterable
from typing import Any

from shared_schemas.base import shown
from shared_schemas.chat import openai_error
from shared_schemas.messages import Message, ToolCall
from task_app.captures.calls import Answer, Call, Event, Item, Json, Keys, objects, tool_call, tool_spec

_TEXT = ("text", "refusal")
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatCompletions:
    """Reads and answers POST .../v1/chat/completions."""

    def read(self, body: Json) -> Call:
        keys = Keys(body)
        messages = keys.messages()
        keys.refuse("n", (1,), "ask once for each answer")
        keys.refuse("modalities", (["text"],), "the policy writes text")
        keys.refuse("functions", ([],), "give tools")
        keys.form(keys.take("response_format", (str, dict)), "response_format")
        keys.skip("user", "metadata", "store", "safety_identifier", "prompt_cache_key")
        stream_options = keys.take("stream_options", dict, {})
        return keys.call(
            map(_read_message, messages),
            lambda item: tool_spec(_read_function(item), "parameters"),
            max_tokens=keys.max_tokens("max_completion_tokens", "max_tokens"),
            stop=keys.stop("stop"),
            include_usage=bool(stream_options.get("include_usage")),
        )

    def body(self, answer: Answer, call: Call) -> Json:
        ending = {"logprobs": None, "finish_reason": answer.finish_reason}
        choice = {"index": 0, "message": _answer_message(answer), **ending}
        return {**_frame(answer, "chat.completion"), "choices": [choice], "usage": _usage(answer)}

    def events(self, answer: Answer, call: Call) -> Iterable[Event]:
        frame, delta = _frame(answer, "chat.completion.chunk"), _answer_message(answer)
        for index, call_delta in enumerate(delta.get("tool_calls", ())):
            call_delta["index"] = index
        for part, reason in ((delta, None), ({}, answer.finish_reason)):
            yield None, {**frame, "choices": [{"index": 0, "delta": part, "finish_reason": reason}]}
        if call.include_usage:
            yield None, {**frame, "choices": [], "usage": _usage(answer)}
        yield None, "[DONE]"

    def count(self, tokens: int) -> Json:
        return {"prompt_tokens": tokens}

    def error(self, status: int, code: str, sentence: str, where: str | None) -> Json:
        return {"error": openai_error(sentence, status=status, code=code, where=where)}


def _read_message(item: Item) -> Message:
    role = item.role(_ROLES)
    fields: dict[str, Any] = {"content": item.content("content", _TEXT)}
    if name := item.text("name", default=""):
        fields["name"] = name
    if role == "tool":
        fields["tool_call_id"] = item.text("tool_call_id", default="")
    if calls := objects(item.get("tool_calls", []), f"{item.where}.tool_calls"):
        fields["tool_calls"] = tuple(map(_read_call, calls))
    return Message(role=role, **fields)


def _read_call(item: Item) -> ToolCall:
    function = _read_function(item)
    name, arguments = function.text("name"), function.text("arguments")
    return tool_call(item.text("id"), name, arguments)


def _read_function(item: Item) -> Item:
    kind = item.get("type", "function")
    if kind != "function":
        raise item.refusal("type", f"is {shown(kind)}; only functions are offered here")
    return Item(item.part("function", dict, "an object"), f"{item.where}.function")


def _answer_message(answer: Answer) -> Json:
    message: Json = {"role": "assistant", "content": answer.text or None, "refusal": None}
    if answer.tool_calls:
        message["tool_calls"] = [call.model_dump(mode="json") for call in answer.tool_calls]
    else:
        message["content"] = answer.text
    return message


def _frame(answer: Answer, kind: str) -> Json:
    call_id = f"chatcmpl-{answer.call_id}"
    return {"id": call_id, "object": kind, "created": answer.created, "model": answer.model}


def _usage(answer: Answer) -> Json:
    prompt, completion = answer.prompt_tokens, answer.completion_tokens
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}
