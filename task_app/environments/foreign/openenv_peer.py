"""`openenv:URL`: plays the environment of an OpenEnv server over a WebSocket. A call is one `step` message.

If the server's actions are MCP calls, the model gets the tools of its MCP interface. Otherwise the model gets
one tool, with the schema of the server's action class as its parameters. `reward` in the server's answer is
the reward (null means 0), and `done` terminates the episode: OpenEnv does not distinguish termination from
truncation. OpenEnv has no snapshots. The published client is not used, because it requires gradio, pandas and
an MCP stack, and does not limit the size of answers.

Source: openenv/core/env_server/{http_server,types,mcp_types,serialization}.py of openenv-core 0.3.0.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from shared_schemas.base import StrictReply, Whole
from shared_schemas.messages import ToolSpec
from task_app.environments.foreign.configs import OpenEnvConfig
from task_app.environments.foreign.environment import ForeignEnvironment, remote_environment
from task_app.environments.foreign.peer import Call, ForeignFailed, Shown
from task_app.environments.foreign.schemas import tool
from task_app.environments.foreign.wire import Http, Socket, below, checked_url, parse_json
from task_app.environments.foreign.words import mcp_tool, render_text, result_text, typed
from task_app.errors import clipped
from task_app.settings import Reach

TYPED_TOOL = "step"


class _Schema(StrictReply):
    action: dict[str, JsonValue]


class _Action(StrictReply):
    """The fields of an action's JSON Schema that are read here."""

    title: str | None = None
    description: str | None = None
    properties: dict[str, JsonValue] | None = None


class _Message(StrictReply):
    type: str
    data: dict[str, JsonValue]


class _Listed(StrictReply):
    tools: list[JsonValue] | None = None


class _Tools(StrictReply):
    result: _Listed | None = None


class _StepReply(StrictReply):
    observation: dict[str, JsonValue]
    reward: float | None = None
    done: bool | None = None


class _Facts(StrictReply):
    """The fields of an observation that are read here."""

    text: JsonValue = None
    tool_name: JsonValue = None
    achievements_counts: dict[str, Whole] | None = None


# Titles of the action classes of servers whose actions are MCP calls.
_MCP_ACTIONS = ("Action", "CallToolAction", "ListToolsAction")
# Types of tool errors that are shown to the model; a tool error of another type fails the episode.
_SEEN_ERRORS = ("execution_error", "invalid_args", "tool_not_found")


def openenv_environment(argument: str, config: OpenEnvConfig, reach: Reach) -> ForeignEnvironment:
    name = f"openenv:{argument}"
    return remote_environment(name, OpenEnvPeer(name, argument, config, reach), config)


class OpenEnvPeer:
    """Plays an OpenEnv server over one WebSocket, for which the server keeps one session."""

    def __init__(self, name: str, url: str, config: OpenEnvConfig, reach: Reach) -> None:
        self._name = name
        self._parts = checked_url(url, reach)
        self._config = config
        self._reach = reach
        self._socket: Socket | None = None
        self._is_mcp = False

    def open(self) -> tuple[ToolSpec, ...]:
        http = Http(self._name, self._reach)
        try:
            _, text = http.send("GET", below(self._parts, "/schema"))
        finally:
            http.close()
        self._socket = Socket(self._name, below(self._parts, "/ws", websocket=True), self._reach)
        schema = typed(_Schema, parse_json(text, self._name), f"{self._name}: /schema").action
        action = typed(_Action, schema, f"{self._name}: the action of /schema")
        tools: list[ToolSpec] = []
        if action.title in _MCP_ACTIONS or "tool_name" in (action.properties or {}):
            request = {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}
            result = typed(_Tools, self._ask("mcp", request), f"{self._name}: tools/list").result
            tools = [mcp_tool(one, self._name) for one in (result.tools if result else None) or ()]
        self._is_mcp = bool(tools)
        if tools:
            return tuple(tools)
        # Every action has `metadata`, which is not for the model.
        properties = {key: part for key, part in (action.properties or {}).items() if key != "metadata"}
        if not properties:
            raise ForeignFailed(f"{self._name} has neither MCP tools nor an action with fields (properties)")
        rest = {
            key: part for key, part in schema.items() if key not in ("title", "description", "properties")
        }
        parameters = {**rest, "properties": properties}
        return (tool(TYPED_TOOL, action.description or "Take one step.", parameters, of=self._name),)

    def reset(self, seed: int) -> Shown:
        shown = self._read_reply(self._ask("reset", {**self._config.reset, "seed": seed}))
        if shown.terminated:
            raise ForeignFailed(f"{self._name}: the episode is over right after its reset")
        return shown

    def carry_out(self, calls: Sequence[Call]) -> Iterator[Shown]:
        for call in calls:
            action: dict[str, Any] = dict(call.arguments)
            if self._is_mcp:
                action = {"type": "call_tool", "tool_name": call.tool, "arguments": action}
            reply = self._ask("step", action)
            yield Shown("", refused=reply) if isinstance(reply, str) else self._read_reply(reply)

    def close(self) -> None:
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> Any:
        """Send a message of type `kind` and return the data of its answer.

        If the server refuses the action of a step as invalid, return the server's reason as a str.
        """
        assert self._socket is not None, "the peer is open"
        reply = typed(_Message, self._socket.ask({"type": kind, "data": data}), f"{self._name}: a message")
        answer = reply.data
        if reply.type == "error":
            code, message = answer.get("code"), clipped(str(answer.get("message")), 300)
            if kind == "step" and code == "VALIDATION_ERROR":
                return f"{message} {clipped(str(answer.get('errors', '')), 300)}".strip()
            raise ForeignFailed(f"{self._name} answered {code} to {kind}: {message}")
        if reply.type != ("mcp" if kind == "mcp" else "observation"):
            raise ForeignFailed(f"{self._name} speaks another protocol: type is {clipped(reply.type)!r}")
        return answer

    def _read_reply(self, data: Mapping[str, Any]) -> Shown:
        reply = typed(_StepReply, data, f"{self._name}: the data of an answer")
        observation = dict(reply.observation)
        metadata = observation.pop("metadata", None)
        for name in ("reward", "done"):
            observation.pop(name, None)
        facts = typed(_Facts, observation, f"{self._name}: an observation")
        return Shown(
            self._read_text(observation, facts),
            {"observation": observation, "metadata": metadata},
            reward=reply.reward or 0.0,
            terminated=bool(reply.done),
            achievements=facts.achievements_counts,
        )

    def _read_text(self, observation: Mapping[str, Any], facts: _Facts) -> str:
        if self._is_mcp and facts.tool_name is not None:
            error = observation.get("error")
            if isinstance(error, dict):
                if error.get("error_type") not in _SEEN_ERRORS:
                    raise ForeignFailed(f"{self._name}: a tool failed: {clipped(str(error), 200)}")
                return f"failed: {error.get('message')}"
            return result_text(observation.get("result"), self._name)
        return facts.text if isinstance(facts.text, str) else render_text(observation)
