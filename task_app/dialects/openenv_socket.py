"""OpenEnv over a WebSocket, as the `openenv` client uses it: /openenv/{env_name}/ws.

Each socket has its own session: the first `reset` creates it, and it is removed when the socket closes. With
`?session_id=` the socket joins a session that /openenv/.../reset or /env/create has created. This
session is kept when the socket closes.

Messages are {"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from fastapi import WebSocket
from starlette.websockets import WebSocketDisconnect, WebSocketState

from shared_schemas.json_text import read_json
from shared_schemas.plain_text import encodable
from task_app.complaints import validated
from task_app.dialects.openenv_mcp import rpc
from task_app.dialects.openenv_session import OpenEnvSession, ignored_keys
from task_app.dialects.openenv_wire import NO_EPISODE, OpenEnvReset
from task_app.errors import (
    CapacityReached,
    EpisodeOver,
    InvalidRequest,
    TaskAppError,
    UnknownId,
    UnknownName,
    boundary,
    clipped,
)
from task_app.routes.wire import ReplyJSON, Router
from task_app.services import Services

router = Router(tags=["openenv"])
log = structlog.get_logger("task_app")

KINDS = ("reset", "step", "state", "mcp", "close")
# OpenEnv's error codes for our classes of errors; the first class that matches an error decides.
_CODES: tuple[tuple[type[TaskAppError], str], ...] = (
    (CapacityReached, "CAPACITY_REACHED"),
    (UnknownName, "FACTORY_ERROR"),
    (UnknownId, "SESSION_ERROR"),
    (InvalidRequest, "VALIDATION_ERROR"),
)


class Sockets:
    """Limits the number of open sockets.

    The limit of sessions does not suffice, because a socket has no session before its first `reset`.
    """

    def __init__(self, at_most: int) -> None:
        self._at_most = at_most
        self.open = 0

    @contextmanager
    def one(self) -> Iterator[None]:
        if self.open >= self._at_most:
            raise CapacityReached(f"{self._at_most} sockets are open, the most that this task app holds")
        self.open += 1
        try:
            yield
        finally:
            self.open -= 1


class Conversation:
    """Answers the messages of one socket, but does not receive or send them itself."""

    def __init__(self, services: Services, env_name: str, session_id: str | None) -> None:
        self._services = services
        self._env_name = env_name
        self._is_joined = session_id is not None
        # Built only to raise UnknownName before the first reset.
        services.boards.environment(env_name, {}, where="")
        self._session = OpenEnvSession.of(services, env_name, session_id) if session_id is not None else None

    async def answer(self, text: str) -> str | None:
        """Return the text that replies to a message; None if the socket must be closed."""
        try:
            kind, data = _read_message(text, self._services.settings.max_body_bytes)
            if kind == "close":
                return None
            if kind == "reset":
                return _frame("observation", await self._reset(data))
            if kind == "step":
                if self._session is None:
                    raise EpisodeOver("no episode was started", hint="send a reset first")
                return _frame("observation", await self._session.step(data, where="data", ignored=[]))
            if kind == "mcp":
                return _frame("mcp", await rpc(self._services, self._env_name, data, session=self._session))
            state = dict(NO_EPISODE) if self._session is None else self._session.state()
            return _frame("state", state)
        except UnknownId:
            raise
        except TaskAppError as exc:
            return error_frame(exc)

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        body = validated(OpenEnvReset, data, where="data")
        if self._session is not None and body.config is None:
            await self._session.reset(body)
        else:
            before, self._session = self._session, None
            if before is not None and not self._is_joined:
                before.end()
            self._session = await OpenEnvSession.start(self._services, self._env_name, body)
            self._is_joined = False
        return self._session.reset_reply(ignored=ignored_keys(body))

    def end(self) -> None:
        """Remove the socket's session, unless the socket joined an existing one."""
        if self._session is not None and not self._is_joined:
            self._session.end()


@router.websocket("/openenv/{env_name}/ws")
async def socket(websocket: WebSocket, env_name: str) -> None:
    """Serve one client until it disconnects, sends `close`, is idle for too long, or its session expires."""
    await websocket.accept()
    services: Services = websocket.app.state.services
    sockets: Sockets = websocket.app.state.openenv_sockets
    # Errors are sent as frames, because OpenEnv's client does not show an HTTP status.
    with suppress(WebSocketDisconnect):
        try:
            with sockets.one():
                talk = Conversation(services, env_name, websocket.query_params.get("session_id"))
                try:
                    await _serve(websocket, talk, idle_s=services.settings.session_idle_s)
                finally:
                    talk.end()
        except TaskAppError as exc:
            await websocket.send_text(error_frame(exc))
    if websocket.application_state is not WebSocketState.DISCONNECTED:
        with suppress(RuntimeError, WebSocketDisconnect):
            await websocket.close()


async def _serve(websocket: WebSocket, talk: Conversation, *, idle_s: float) -> None:
    while True:
        try:
            async with asyncio.timeout(idle_s):
                message = await websocket.receive()
        except TimeoutError as exc:
            raise UnknownId("session", "", where="socket", hint=f"idle for {idle_s:g} s") from exc
        if message["type"] == "websocket.disconnect":
            return
        with boundary("openenv"):
            reply = await talk.answer(message.get("text") or "")
        if reply is None:
            return
        await websocket.send_text(reply)


def _read_message(text: str, max_bytes: int) -> tuple[str, dict[str, Any]]:
    if len(text) > max_bytes:
        raise InvalidRequest(f"a message of {len(text)} characters; at most {max_bytes}", where="message")
    try:
        message = read_json(text)
    except ValueError as exc:
        hint = "send it as a text frame"
        raise InvalidRequest(str(exc), where="message", hint=hint, code="invalid_json") from exc
    kind = message.get("type", "") if isinstance(message, dict) else ""
    if kind not in KINDS:
        detail = f"unknown message type {clipped(str(kind))!r}; known: {', '.join(KINDS)}"
        raise InvalidRequest(detail, where="type", code="unknown_type")
    data = message.get("data", {})
    if not isinstance(data, dict):
        raise InvalidRequest("data is no JSON object", where="data")
    return kind, data


def error_frame(error: TaskAppError) -> str:
    """Return an error as a frame's text.

    The frame contains OpenEnv's `message` and `code`, our own code as `problem`, and the path of the fault.
    """
    error.release_frames()
    detail = encodable(error.detail)
    code = next((code for kind, code in _CODES if isinstance(error, kind)), "EXECUTION_ERROR")
    if error.code in ("invalid_json", "unknown_type"):
        code = error.code.upper()
    data = {
        "message": f"{detail} ({error.hint})" if error.hint else detail,
        "code": code,
        "problem": error.code,
        "where": error.where and encodable(error.where),
    }
    return _frame("error", data)


def _frame(kind: str, data: dict[str, Any]) -> str:
    return bytes(ReplyJSON({"type": kind, "data": data}).body).decode()
