"""Converts a policy's action, or the tool calls of an HTTP request, into calls of an environment. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic_core import to_json

from shared_schemas.json_text import encodable_json, plain_json, plain_number
from shared_schemas.messages import FunctionCall, ToolCall
from shared_schemas.plain_text import encodable
from task_app.protocols import ToolRequest


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no finite number")
    return number


_JSON = json.JSONDecoder(parse_float=_finite, parse_constant=_finite)
_NAMES, _ARGUMENTS = ("name", "tool", "tool_name"), ("arguments", "args")
NO_TOOL_CALL = "the reply holds no tool call; call one of the tools"


@dataclass(frozen=True, slots=True)
class Choice:
    """The return value of `AgentPolicy.get_action` with named fields."""

    action: dict[str, Any]
    raw_output: str | None = None
    log_probs: Mapping[str, Any] = field(default_factory=dict)
    value: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "action", plain_json(self.action, "action"))
        object.__setattr__(self, "log_probs", plain_json(self.log_probs, "log_probs"))
        if self.value is not None:
            object.__setattr__(self, "value", plain_number(self.value, "value_estimate"))


@dataclass(frozen=True, slots=True)
class Action:
    """The policy's action in one decision. `tool_calls` are recorded, `requests` are sent to the environment.

    `text` is a reply without a tool call. An `AnsweredEnvironment` may accept such a reply; any other
    environment refuses it and gives `invalid_reason` as the reason. `text` is None for all other actions, and
    for a reply that could not be read.
    """

    tool_calls: tuple[ToolCall, ...] = ()
    requests: tuple[ToolRequest, ...] = ()
    text: str | None = None
    invalid_reason: str | None = None
    terminate: bool = False


def read_action(action: Mapping[str, Any]) -> Action:
    """Convert the first element of the tuple that `AgentPolicy.get_action` returns.

    An action of the type `tool_call` contains either one call, in its own keys `name` and `arguments` (the
    published form), or a list of calls in `tool_calls`. If it contains both, the only call in the list must
    be the call in its own keys.

    Raises:
        ValueError: `type` is unknown, or the two forms contain different calls. This is a bug of the policy.
    """
    match action.get("type"):
        case "tool_call":
            stated = action.get("tool_calls", [action])
            calls = tuple([_make_tool_call(call, index) for index, call in enumerate(stated)])
            requests = tuple([tool_request(call) for call in calls])
            if "name" in action and "tool_calls" in action and not _is_one_call(requests, action):
                raise ValueError(
                    f"the action names a call of {action['name']!r} that its 'tool_calls' do not hold alone; "
                    "change both, or leave one out"
                )
            return Action(tool_calls=calls, requests=requests)
        case "text":
            reason = action.get("invalid_reason") or NO_TOOL_CALL
            # If the missing call is the only fault, the text is an answer. With any other fault it is none.
            text = encodable(action.get("content") or "") if reason == NO_TOOL_CALL else None
            return Action(text=text, invalid_reason=encodable(reason))
        case "terminate":
            return Action(terminate=True)
        case other:
            raise ValueError(f"action type is {other!r}; allowed: 'tool_call', 'text', 'terminate'")


def _is_one_call(requests: Sequence[ToolRequest], action: Mapping[str, Any]) -> bool:
    """Return whether `requests` is exactly the one call in the action's own keys `name` and `arguments`."""
    name, arguments = action["name"], action["arguments"]
    if len(requests) != 1 or requests[0].name != encodable(name):
        return False
    ours = requests[0]
    if ours.arguments is not None and ours.arguments == arguments:  # always true for our own policies
        return True
    other = tool_request(_make_tool_call(action, 0))
    if ours.arguments != other.arguments:
        return False
    return other.arguments is not None or ours.raw_arguments == other.raw_arguments


def tool_request(call: ToolCall) -> ToolRequest:
    """Convert a call and parse its arguments; `arguments` is None if their text is not a JSON object."""
    text = call.function.arguments
    return ToolRequest(name=call.function.name, arguments=json_object(text), raw_arguments=text)


def json_object(text: str) -> Mapping[str, Any] | None:
    """Parse a model's text as a JSON object; return None if the text is anything else.

    An object that contains NaN, or a number beyond a float's range, also gives None, because no record can
    store such a value.
    """
    try:
        value = _JSON.decode(text)
        if not text.isascii() or "\\u" in text:  # other texts contain no lone surrogates
            value = encodable_json(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def requests_from_wire(calls: Sequence[Mapping[str, Any]]) -> tuple[ToolRequest, ...]:
    """Convert the tool calls in the body of POST /env/step.

    A call has OpenAI's form, or the form {"tool": ..., "args": ...}. The key `tool` may also be called
    `tool_name` or `name`, and the key `args` may also be called `arguments`.

    Raises:
        ValueError: a call names no tool.
    """
    return tuple([_read_request(call, index) for index, call in enumerate(calls)])


def _read_request(call: Mapping[str, Any], index: int) -> ToolRequest:
    name, arguments = name_and_arguments(call)
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_calls.{index} names no tool; give 'tool' (or 'function.name')")
    if isinstance(arguments, str):
        return ToolRequest(name=name, arguments=json_object(arguments), raw_arguments=arguments)
    if arguments is None:
        arguments = {}
    text = to_json(arguments).decode()
    return ToolRequest(name, arguments if isinstance(arguments, dict) else None, text)


def name_and_arguments(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """Return the name and the arguments of a call; a missing part is None.

    Each part is read from the first of its alternative keys that the call contains.
    """
    function = call.get("function")
    source = function if isinstance(function, dict) else call
    name, arguments = (
        next((source[key] for key in keys if key in source), None) for keys in (_NAMES, _ARGUMENTS)
    )
    return name, arguments


def _make_tool_call(call: Mapping[str, Any], index: int) -> ToolCall:
    arguments = call["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return ToolCall(
        id=encodable(call.get("id") or f"call_{index}"),
        function=FunctionCall(name=encodable(call["name"]), arguments=encodable(text)),
    )
