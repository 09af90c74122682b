"""Converts a policy's action, or the tool calls of a request, for the environment. Pure."""

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
    """An action of an episode: `tool_calls` are recorded, `requests` are sent to the environment.

    `text` is an answer without a call, which only an `AnsweredEnvironment` accepts; any other environment
    refuses it with `invalid_reason`. `text` is None if the reply could not be read.
    """

    tool_calls: tuple[ToolCall, ...] = ()
    requests: tuple[ToolRequest, ...] = ()
    text: str | None = None
    invalid_reason: str | None = None
    terminate: bool = False


def read_action(action: Mapping[str, Any]) -> Action:
    """Read the first element of `AgentPolicy.get_action`'s tuple.

    The action itself may be a single call, which is the published form; `tool_calls` may have several. If
    both are given, they must be the same call.

    Raises:
        ValueError: `type` is unknown, or the two forms of a call differ. This is a bug of the policy.
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
            # Text whose only fault is the missing call is a valid answer; with another fault it is none.
            text = encodable(action.get("content") or "") if reason == NO_TOOL_CALL else None
            return Action(text=text, invalid_reason=encodable(reason))
        case "terminate":
            return Action(terminate=True)
        case other:
            raise ValueError(f"action type is {other!r}; allowed: 'tool_call', 'text', 'terminate'")


def _is_one_call(requests: Sequence[ToolRequest], action: Mapping[str, Any]) -> bool:
    """Return whether the only request is the call in the action itself, with equal arguments."""
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
    """Parse the arguments of a call; text that is not a JSON object stays in `raw_arguments` only."""
    text = call.function.arguments
    return ToolRequest(name=call.function.name, arguments=json_object(text), raw_arguments=text)


def json_object(text: str) -> Mapping[str, Any] | None:
    """Parse a JSON object in a model's text; None if the text is anything else.

    NaN and numbers beyond a float's range also give None, because no record can hold them.
    """
    try:
        value = _JSON.decode(text)
        if not text.isascii() or "\\u" in text:  # otherwise it has no lone surrogates
            value = encodable_json(value)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def requests_from_wire(calls: Sequence[Mapping[str, Any]]) -> tuple[ToolRequest, ...]:
    """Read the tool calls of POST /env/step: OpenAI's form, or {tool | tool_name | name, args | arguments}.

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
    """Return name and arguments of a call, each from the first of its possible keys; None if missing."""
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
