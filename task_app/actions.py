"""Pure: a policy's action, or the tool calls of a request -> what an environment carries out."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shared_schemas.messages import FunctionCall, ToolCall
from task_app.protocols import ToolRequest

NO_TOOL_CALL = "the reply holds no tool call; call one of the tools"


@dataclass(frozen=True, slots=True)
class ReadAction:
    """An action as the episode uses it: `tool_calls` go on record, `requests` to the environment."""

    tool_calls: tuple[ToolCall, ...] = ()
    requests: tuple[ToolRequest, ...] = ()
    invalid_reason: str | None = None
    terminate: bool = False
    text: str | None = None


def read_action(action: Mapping[str, Any]) -> ReadAction:
    """Read the first element of `AgentPolicy.get_action`'s tuple.

    Raises:
        ValueError: `type` is none of the three that the protocol names; a fault of the policy's code.
    """
    match action.get("type"):
        case "tool_call":
            calls = tuple(_tool_call(call) for call in action["tool_calls"])
            return ReadAction(tool_calls=calls, requests=tuple(tool_request(call) for call in calls))
        case "text":
            reason = action.get("invalid_reason") or NO_TOOL_CALL
            return ReadAction(invalid_reason=reason, text=action.get("content") or "")
        case "terminate":
            return ReadAction(terminate=True)
        case other:
            raise ValueError(f"action type is {other!r}; allowed: 'tool_call', 'text', 'terminate'")


def tool_request(call: ToolCall) -> ToolRequest:
    """Parse the arguments; text that is no JSON object stays readable in `raw_arguments`."""
    text = call.function.arguments
    return ToolRequest(name=call.function.name, arguments=json_object(text), raw_arguments=text)


def json_object(text: str) -> Mapping[str, Any] | None:
    """The JSON object that `text` spells, or None: a model may write anything, nested however deep."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def requests_from_wire(calls: Sequence[Mapping[str, Any]]) -> tuple[ToolRequest, ...]:
    """The tool calls of POST /env/step, in OpenAI's form or as {tool | tool_name | name, args | arguments}.

    Raises:
        ValueError: a call names no tool; the message says which one.
    """
    return tuple(_wire_request(call, index) for index, call in enumerate(calls))


def _wire_request(call: Mapping[str, Any], index: int) -> ToolRequest:
    function = call.get("function")
    source: Mapping[str, Any] = function if isinstance(function, dict) else call
    name = next((source[key] for key in ("name", "tool", "tool_name") if key in source), None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"tool_calls.{index} names no tool; give 'tool' (or 'function.name')")
    arguments: Any = next((source[key] for key in ("arguments", "args") if key in source), {})
    if isinstance(arguments, dict):
        return ToolRequest(name=name, arguments=arguments, raw_arguments=json.dumps(arguments))
    if isinstance(arguments, str):
        return ToolRequest(name=name, arguments=json_object(arguments), raw_arguments=arguments)
    return ToolRequest(name=name, arguments=None, raw_arguments=json.dumps(arguments))


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    return ToolCall(id=call["id"], function=FunctionCall(name=call["name"], arguments=call["arguments"]))
