"""Translates between OpenEnv's messages (openenv 0.10) and our calls and observations. Performs no I/O.

An OpenEnv `step` is one decision. Its action has one of these forms:

    {"tool_name": "interact_many", "arguments": {...}}   one call; MCP clients add "type": "call_tool"
    {"tool_calls": [...]}                                 several calls of one decision, as in POST /env/step
    {"actions": ["move_left", ...]}                       the arguments alone, if there is only one tool
    {"type": "list_tools"}                                returns the tools, without a decision

Source: openenv/core/env_server/types.py, serialization.py and http_server.py of openenv 0.10.0.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from shared_schemas.base import OpenReply, Reply
from shared_schemas.messages import ToolSpec
from shared_schemas.rollouts import Seed
from shared_schemas.trajectory import DecisionRewards
from task_app.errors import InvalidRequest
from task_app.protocols import ToolRequest
from task_app.routes.wire import ForeignBody, read_calls

NO_EPISODE: Mapping[str, Any] = {"episode_id": None, "step_count": 0}
_NAMES = ("tool_name", "tool", "name", "function")


class OpenEnvReset(ForeignBody):
    """The body of a reset. The reply's `metadata.ignored` lists the body's unknown keys."""

    seed: Seed | None = Field(default=None, description="by default the last seed; 0 at first")
    episode_id: str | None = Field(default=None, max_length=255)
    config: dict[str, Any] | None = Field(default=None, description="of the environment; makes a new one")


class OpenEnvTool(Reply):
    """A tool, described as in MCP."""

    name: str
    description: str
    input_schema: dict[str, Any] = Field(description="JSON Schema of the arguments")


class OpenEnvMeta(OpenReply):
    """Facts about the episode and its last decision. After a reset, only the episode's fields are set."""

    session_id: str
    episode_id: str
    seed: int
    ignored: tuple[str, ...] = Field(default=(), description="keys of the request that nothing read")
    outcome_definition: str | None = None
    terminated: bool = False
    truncated: bool = False
    env_rewards: tuple[float, ...] = ()
    step_idx: int | None = None
    turn: int | None = None
    achievements_added: tuple[str, ...] = ()
    invalid_reason: str | None = None
    executed_actions: tuple[str, ...] = ()
    tool_result: str | None = None
    decision_rewards: DecisionRewards | None = None


class OpenEnvObservation(Reply):
    """The observation for the policy. After a list_tools action, it contains only `tools` and `metadata`."""

    text: str | None = None
    data: dict[str, Any] = Field(default_factory=dict)
    achievements_status: dict[str, bool] = Field(default_factory=dict)
    achievements_counts: dict[str, int] = Field(default_factory=dict)
    reward_last_step: float | None = None
    tool_name: str | None = Field(default=None, description="of a call_tool action")
    result: str | None = Field(default=None, description="of a call_tool action")
    tools: tuple[OpenEnvTool, ...] = Field(default=(), description="of a list_tools action")
    metadata: OpenEnvMeta


class OpenEnvReply(Reply):
    """The reply to a reset or a step. `reward` is null if no decision was made."""

    observation: OpenEnvObservation
    reward: float | None
    done: bool
    metadata: OpenEnvMeta


class _Seen(OpenEnvObservation, title="Observation"):
    """An observation as OpenEnv's clients read it, which also contains `done` and `reward`."""

    done: bool
    reward: float | None


class _SeenAfterReset(_Seen):
    reward: None


class OpenEnvState(Reply):
    """The state of the episode. The last three fields are absent before the first reset."""

    episode_id: str | None
    step_count: int = Field(ge=0, description="decisions: `step` messages that were carried out")
    env_steps: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0)
    done: bool = False


def read_action(
    action: Mapping[str, Any], tools: Sequence[ToolSpec], *, at_most: int, where: str
) -> tuple[ToolRequest, ...]:
    calls = _find_calls({name: value for name, value in action.items() if name != "metadata"}, tools)
    if calls is None:
        names = ", ".join(tool.function.name for tool in tools)
        raise InvalidRequest(
            f"the action names no tool; give tool_name and arguments, or tool_calls; tools: {names}",
            where=where,
        )
    return read_calls(calls, at_most=at_most, where=where)


def _find_calls(action: Mapping[str, Any], tools: Sequence[ToolSpec]) -> list[Mapping[str, Any]] | None:
    calls = action.get("tool_calls")
    if isinstance(calls, list) and all(isinstance(call, dict) for call in calls):
        return calls
    if any(name in action for name in _NAMES):
        return [action]
    if len(tools) == 1 and action.keys() <= tools[0].function.parameters.get("properties", {}).keys():
        return [{"name": tools[0].function.name, "arguments": dict(action)}]
    return None


def tools_json(tools: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the tools as MCP describes tools."""
    return [
        {
            "name": tool.function.name,
            "description": tool.function.description,
            "input_schema": tool.function.parameters,
        }
        for tool in tools
    ]


def reply_data(
    observation: dict[str, Any], reward: float | None, done: bool, metadata: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a reply with `metadata` also inside its observation, where OpenEnv's typed clients read it."""
    inner = {**observation, "metadata": dict(metadata)}
    return {"observation": inner, "reward": reward, "done": done, "metadata": dict(metadata)}


def schemas(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    """Return the JSON Schemas of `action`, `observation`, `reset_observation` and `state`."""
    return {
        "action": _action_schema(tools),
        "observation": _Seen.model_json_schema(),
        "reset_observation": _SeenAfterReset.model_json_schema(),
        "state": {**OpenEnvState.model_json_schema(), "title": "State"},
    }


def document(whole: Mapping[str, Any], *, prefix: str, url: str) -> dict[str, Any]:
    """Return the OpenAPI document of one environment, as if the environment had its own OpenEnv server.

    `whole` is the document of the service. Of its paths, those that begin with `prefix` are kept, without the
    prefix. The document names `url` as its server.
    """

    def drop_env_name(operation: Mapping[str, Any]) -> dict[str, Any]:
        parameters = [part for part in operation.get("parameters", ()) if part["name"] != "env_name"]
        return {**operation, "parameters": parameters}

    paths = {
        path.removeprefix(prefix): {method: drop_env_name(item[method]) for method in item}
        for path, item in whole["paths"].items()
        if path.startswith(prefix + "/")
    }
    return {**whole, "servers": [{"url": url}], "paths": paths}


def _action_schema(tools: Sequence[ToolSpec]) -> dict[str, Any]:
    forms: list[dict[str, Any]] = [
        {
            "type": "object",
            "description": tool.function.description,
            "required": ["tool_name"],
            "properties": {
                "type": {"const": "call_tool"},
                "tool_name": {"const": tool.function.name},
                "arguments": {"type": "object", **tool.function.parameters},
            },
        }
        for tool in tools
    ]
    calls = {"type": "array", "minItems": 1, "items": {"type": "object"}}
    forms.append({"type": "object", "required": ["tool_calls"], "properties": {"tool_calls": calls}})
    if len(tools) == 1:
        forms.append({"type": "object", **tools[0].function.parameters})
    properties = {"type": {"const": "list_tools"}}
    forms.append({"type": "object", "required": ["type"], "properties": properties})
    return {"title": "Action", "anyOf": forms}
