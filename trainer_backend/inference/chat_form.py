"""Check the form of the messages and tools of a chat request, so that a chat template can read them.

The checked values are never null, because `shared_schemas.chat.without_nulls` has removed nulls. The checks
are written by hand instead of as pydantic models for two reasons. They must be fast, because every message of
every decision is checked. And an error location such as `messages.2.content.0.text` must name the item as it
appears in the caller's request.
"""

from collections.abc import Mapping
from typing import Any

from shared_schemas.base import did_you_mean, say_needed, shown
from shared_schemas.messages import ROLES
from trainer_backend.errors import BadChatRequest
from trainer_backend.inference.reply import TOOL_CALL_ERROR

# OpenAI's newer name of the role "system".
DEVELOPER = "developer"
_ROLES = (*ROLES, DEVELOPER)
# _TEXTS and _OTHER_KEYS are the keys of a message that this server, a chat template or a rollout reads. The
# values of _TEXTS must be strings. _OF_ANSWERS are keys that clients add to answers; the listed values have
# no effect.
_TEXTS = frozenset({"name", "tool_call_id", "tool_name", "reasoning", "reasoning_content"})
_OTHER_KEYS = frozenset({"role", "content", "tool_calls", "msg_id", "msg_id(invoking_assistant)"})
_OF_ANSWERS: Mapping[str, tuple[object, ...]] = {
    "refusal": ("",),
    "annotations": ([],),
    "audio": (),
    "function_call": (),
}


def check_message(message: Mapping[str, Any], *, where: str) -> None:
    """Raise BadChatRequest if a message has an invalid form, or a key that would be ignored."""
    role = message.get("role")
    if role not in _ROLES:
        reason = f"role is {role!r:.80}{did_you_mean(str(role)[:80], _ROLES)}"
        raise BadChatRequest(reason, where=f"{where}.role")
    for name, value in message.items():
        if name in _TEXTS:
            _check(message, name, str, "a text", where)
        elif name not in _OTHER_KEYS:
            _refuse_with_effect(name, value, where)
    if "content" in message and not isinstance(message["content"], str):
        _check_content(message["content"], where=f"{where}.content")
    if "tool_calls" in message:
        _check(message, "tool_calls", list, "a list", where)
        for place, call in enumerate(message["tool_calls"]):
            _check_call(call, where=f"{where}.tool_calls.{place}")


def _refuse_with_effect(name: str, value: object, where: str) -> None:
    """Raise BadChatRequest for a key that is not read, unless its value has no effect.

    Values without effect exist only for keys that clients add to answers (`_OF_ANSWERS`, TOOL_CALL_ERROR).
    """
    if name == TOOL_CALL_ERROR or value in _OF_ANSWERS.get(name, ()):
        return
    keys = [*_TEXTS, *_OTHER_KEYS, *_OF_ANSWERS, TOOL_CALL_ERROR]
    reason = f"{name} = {value!r:.80} is not offered here"
    if name not in _OF_ANSWERS:
        reason = f"unknown key {name[:80]!r}{did_you_mean(name[:80], keys)}"
    raise BadChatRequest(reason, where=f"{where}.{name[:80]}")


def check_tool(tool: Mapping[str, Any], *, where: str) -> None:
    """Raise BadChatRequest if a tool is not a function, or if its function has an invalid form."""
    _check_function(tool, where)
    function, place = tool["function"], f"{where}.function"
    for name, kind, needed in (("description", str, "a text"), ("parameters", dict, "a JSON Schema")):
        if name in function:
            _check(function, name, kind, needed, place)
    # Many templates iterate over the properties, but read nothing below them.
    schema, place = function.get("parameters", {}), f"{place}.parameters"
    if "properties" in schema:
        _check(schema, "properties", dict, "an object", place)
        for name in schema["properties"]:
            _check(schema["properties"], name, (dict, bool), "a JSON Schema", f"{place}.properties")


def _check_content(content: object, *, where: str) -> None:
    if not isinstance(content, list):
        raise BadChatRequest(
            f"content is {shown(content)}; it is a text, a list of text parts, or null", where=where
        )
    for place, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            raise BadChatRequest(
                f'a part is {shown(part)}; only {{"type": "text", "text": "…"}} is read',
                where=f"{where}.{place}",
            )
        _check(part, "text", str, "a text", f"{where}.{place}")


def _check_call(call: object, *, where: str) -> None:
    if not isinstance(call, dict):
        form = '{"id", "type", "function": {"name", "arguments"}}'
        raise BadChatRequest(f"a tool call is {shown(call)}; its form is {form}", where=where)
    if "id" in call:
        _check(call, "id", str, "a text", where)
    _check_function(call, where)
    if "arguments" in call["function"]:
        _check(call["function"], "arguments", (str, dict), "JSON text or an object", f"{where}.function")


def _check_function(item: Mapping[str, Any], where: str) -> None:
    """Check the fields that tools and tool calls have in common: `type`, `function` and its `name`."""
    if item.get("type", "function") != "function":
        raise BadChatRequest(f"type is {shown(item['type'])}; 'function' is allowed", where=f"{where}.type")
    _check(item, "function", dict, "an object", where)
    _check(item["function"], "name", str, "a text", f"{where}.function")


def _check(
    home: Mapping[str, Any], name: str, kind: type | tuple[type, ...], needed: str, where: str
) -> None:
    if not isinstance(home.get(name), kind):
        raise BadChatRequest(say_needed(home, name, needed), where=f"{where}.{name}")
