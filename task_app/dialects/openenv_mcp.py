"""OpenEnv's MCP interface: JSON-RPC by POST /openenv/{env_name}/mcp, or in a socket's {"type": "mcp"} frames.

The methods are `openenv/session/create`, `openenv/session/close`, `tools/list` and `tools/call`. A tool call
is a decision. OpenEnv's `MCPToolClient` creates a session and calls tools by these methods. To reset the
session or read its state, the client joins the session with a WebSocket.
"""

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import Body, Request
from pydantic import Field
from starlette.responses import Response

from shared_schemas.base import OpenReply
from shared_schemas.plain_text import encodable
from shared_schemas.rollouts import Name
from task_app.dialects.openenv_session import OpenEnvSession
from task_app.dialects.openenv_wire import OpenEnvMeta, OpenEnvReset, OpenEnvTool, tools_json
from task_app.errors import CriticalError, InvalidRequest, TaskAppError, UnknownId
from task_app.routes.wire import ReplyJSON, Router
from task_app.services import Services, get_services

router = Router(prefix="/openenv/{env_name}", tags=["openenv"])

METHODS = ("openenv/session/create", "openenv/session/close", "tools/list", "tools/call")
_SERVER, _INVALID_REQUEST, _NO_METHOD, _PARAMS, _INTERNAL = -32000, -32600, -32601, -32602, -32603


class RpcResult(OpenReply):
    """The result of a method: a session, a list of tools, or the effects and reward of a tool call."""

    session_id: str | None = None
    closed: bool = False
    tools: tuple[OpenEnvTool, ...] = ()
    tool_name: str | None = None
    result: str | None = None
    text: str | None = None
    achievements_status: dict[str, bool] = Field(default_factory=dict)
    error: None = None
    reward: float | None = None
    done: bool = False
    metadata: OpenEnvMeta | None = None


class RpcFaultData(OpenReply):
    problem: str
    where: str | None


class RpcFault(OpenReply):
    code: int
    message: str
    data: RpcFaultData | None = None


class RpcReply(OpenReply):
    """A JSON-RPC reply, which contains either a result or an error."""

    jsonrpc: str
    id: str | int | float | None
    result: RpcResult | None = None
    error: RpcFault | None = None


@router.post("/mcp", response_model=RpcReply)
async def call_openenv_mcp(
    request: Request, env_name: Name, message: Annotated[dict[str, Any], Body()]
) -> Response:
    """Answer one JSON-RPC request. An error is reported inside a reply with status 200, as in JSON-RPC."""
    return ReplyJSON(await rpc(get_services(request), env_name, message, session=None))


async def rpc(
    services: Services, env_name: str, message: Mapping[str, Any], *, session: OpenEnvSession | None
) -> dict[str, Any]:
    """Return the JSON-RPC reply to a request.

    `session` is the socket's session. If it is None, `openenv/session/create` opens a session, and the other
    methods use the session that `params.session_id` names.
    """
    call_id = message.get("id")
    is_id = call_id is None or type(call_id) in (str, int, float)
    answer: dict[str, Any] = {"jsonrpc": "2.0", "id": call_id if is_id else None}
    method, params = message.get("method"), message.get("params", {})
    try:
        if not is_id:
            raise InvalidRequest("id is no string and no number", where="id", code="no_request")
        if not isinstance(method, str) or not isinstance(params, dict):
            raise InvalidRequest("expected {jsonrpc, id, method, params}", where="method", code="no_request")
        if method not in METHODS:
            detail = f"no method {method[:80]!r}; known: {', '.join(METHODS)}"
            raise InvalidRequest(detail, where="method", code="no_method")
        return answer | {"result": await _call_method(services, env_name, method, params, session)}
    except TaskAppError as exc:
        exc.release_frames()
        return answer | {"error": _dump_error(exc)}


async def _call_method(
    services: Services, env_name: str, method: str, params: dict[str, Any], session: OpenEnvSession | None
) -> dict[str, Any]:
    if method == "openenv/session/create":
        target = session or await OpenEnvSession.start(services, env_name, OpenEnvReset())
        return {"session_id": target.session_id}
    if method == "tools/list" and session is None and "session_id" not in params:
        environment = services.boards.environment(env_name, {})
        return {"tools": tools_json(await services.fetch_tools(environment))}
    target = session or OpenEnvSession.of(services, env_name, str(params.get("session_id", "")))
    if method == "openenv/session/close":
        target.end()
        return {"session_id": target.session_id, "closed": True}
    if method == "tools/list":
        return {"tools": tools_json(await services.fetch_tools(target.session.environment))}
    call = {"tool_name": params.get("name"), "arguments": params.get("arguments", {})}
    step = await target.step({"type": "call_tool", **call}, where="params", ignored=[])
    # This is OpenEnv's CallToolObservation, without `data`, which clients would take for the tool's result.
    observation = step["observation"]
    reply = {name: observation[name] for name in ("tool_name", "result", "text", "achievements_status")}
    return reply | {"error": None} | {name: step[name] for name in ("reward", "done", "metadata")}


def _dump_error(error: TaskAppError) -> dict[str, Any]:
    if isinstance(error, CriticalError):
        return {"code": _INTERNAL, "message": "a plug-in of this task app failed; its log says how"}
    codes = {"no_request": _INVALID_REQUEST, "no_method": _NO_METHOD}
    code = _PARAMS if isinstance(error, InvalidRequest | UnknownId) else _SERVER
    detail = encodable(error.detail)
    return {
        "code": codes.get(error.code, code),
        "message": f"{detail} ({error.hint})" if error.hint else detail,
        "data": {"problem": error.code, "where": error.where},
    }
