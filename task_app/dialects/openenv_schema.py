"""Pure: the JSON Schemas that OpenEnv's GET /schema answers, from the tools of an environment."""

from collections.abc import Mapping, Sequence
from typing import Any

from shared_schemas.messages import ToolSpec

_NUMBERS = {"type": "array", "items": {"type": "number"}}
_COUNTS = {"type": "object", "additionalProperties": {"type": "integer", "minimum": 0}}


def schemas(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """`action`, `observation` (also of `reset`) and `state`."""
    return {
        "action": _action(tools),
        "observation": _observation(reward={"type": ["number", "null"]}),
        "reset_observation": _observation(reward={"type": "null"}),
        "state": _state(),
    }


def document(whole: Mapping[str, Any], *, prefix: str, url: str) -> dict[str, Any]:
    """The OpenAPI document of one environment, as its own OpenEnv server would have it.

    Args:
        whole: that of the service.
        prefix: of the paths that are meant, with a parameter for the environment.
        url: what stands for `prefix`.
    """
    paths = {
        path.removeprefix(prefix): {method: _without(one, "env_name") for method, one in item.items()}
        for path, item in whole["paths"].items()
        if path.startswith(prefix + "/")
    }
    return {**whole, "servers": [{"url": url}], "paths": paths}


def _without(operation: Mapping[str, Any], parameter: str) -> dict[str, Any]:
    kept = [one for one in operation.get("parameters", ()) if one["name"] != parameter]
    return {**operation, "parameters": kept}


def _action(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    forms = [_call(tool) for tool in tools]
    calls = {"type": "array", "minItems": 1, "items": {"type": "object"}}
    forms.append({"type": "object", "required": ["tool_calls"], "properties": {"tool_calls": calls}})
    if len(tools) == 1:
        forms.append({"type": "object", **tools[0].function.parameters})
    asked = {"type": {"const": "list_tools"}}
    forms.append({"type": "object", "required": ["type"], "properties": asked})
    return {"title": "Action", "anyOf": forms}


def _call(tool: ToolSpec) -> dict[str, Any]:
    return {
        "type": "object",
        "description": tool.function.description,
        "required": ["tool_name"],
        "properties": {
            "type": {"const": "call_tool"},
            "tool_name": {"const": tool.function.name},
            "arguments": {"type": "object", **tool.function.parameters},
        },
    }


def _observation(*, reward: dict[str, Any]) -> dict[str, Any]:
    properties = {
        "text": {"type": "string"},
        "data": {"type": "object"},
        "achievements_status": {"type": "object", "additionalProperties": {"type": "boolean"}},
        "achievements_counts": _COUNTS,
        "reward_last_step": {"type": "number"},
        "tool_name": {"type": "string", "description": "of a call_tool action"},
        "result": {"type": "string", "description": "of a call_tool action"},
        "tools": {"type": "array", "items": {"type": "object"}, "description": "of a list_tools action"},
        "done": {"type": "boolean"},
        "reward": reward,
        "metadata": {"type": "object", "properties": {"env_rewards": _NUMBERS}},
    }
    return {
        "title": "Observation",
        "type": "object",
        "properties": properties,
        "additionalProperties": False,
    }


def _state() -> dict[str, Any]:
    number = {"type": "integer", "minimum": 0}
    return {
        "title": "State",
        "type": "object",
        "required": ["episode_id", "step_count"],
        "properties": {
            "episode_id": {"type": ["string", "null"]},
            "step_count": {**number, "description": "decisions: `step` messages that were carried out"},
            "env_steps": number,
            "seed": number,
            "done": {"type": "boolean"},
        },
    }
