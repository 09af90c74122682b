"""OpenEnv over a WebSocket: /openenv/{env_name}/ws, what the `openenv` client speaks.

A socket is a session: the first `reset` makes its environment, the end of the socket forgets it. With
`?session_id=` it joins a session that is there already (made by /openenv/.../reset or /env/create), which it
leaves as it is. Messages are {"type": "reset" | "step" | "state" | "mcp" | "close", "data": {...}}.
"""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import structlog
from fastapi import APIRouter, WebSocket
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect, WebSocketState

from shared_schemas.json_text import encodable, read_json
from task_app.complaints import invalid, most_telling
from task_app.dialects.openenv_mcp import rpc
from task_app.dialects.openenv_session import OpenEnvSession, ignored_keys
from task_app.dialects.openenv_wire import NO_EPISODE, OpenEnvReset
from task_app.errors import (
    CapacityReached,
    CriticalError,
    EpisodeOver,
    InvalidRequest,
    TaskAppError,
    UnknownId,
    UnknownName,
    boundary,
    clipped,
)
from task_app.routes.wire import ReplyJSON
from task_app.services import Services

router = APIRouter(tags=["openenv"])
log = structlog.get_logger("task_app")

KINDS = ("reset", "step", "state", "mcp", "close")
# Where OpenEnv has a word of its own for an error; the first class that fits names it.
_CODES: tuple[tuple[type[TaskAppError], str], ...] = (
    (CapacityReached, "CAPACITY_REACHED"),
    (UnknownName, "FACTORY_ERROR"),
    (UnknownId, "SESSION_ERROR"),
    (InvalidRequest, "VALIDATION_ERROR"),
)


class Sockets:
    """How many are open. One without a `reset` yet holds no environment, so sessions do not bound them."""

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
    """One socket's side of the protocol, without the socket: text in, text out."""

    def __init__(self, services: Services, env_name: str, session_id: str | None) -> None:
        self._services = services
        self._env_name = env_name
        self._joined = session_id is not None
        # Early, so that a name which leads nowhere is told before the first reset.
        services.boards.environment(env_name, {}, where="")
        self._found = OpenEnvSession.of(services, env_name, session_id) if session_id is not None else None

    async def answer(self, text: str) -> str | None:
        """The answer to one message; None closes the socket."""
        try:
            kind, data = _read(text, self._services.settings.max_body_bytes)
            if kind == "close":
                return None
            if kind == "reset":
                return _frame("observation", await self._reset(data))
            if kind == "step":
                return _frame("observation", await self._step(data))
            if kind == "mcp":
                return _frame("mcp", await rpc(self._services, self._env_name, data, session=self._found))
            return _frame("state", self._state())
        except UnknownId:
            raise
        except TaskAppError as exc:
            return error_frame(exc)

    async def _reset(self, data: dict[str, Any]) -> dict[str, Any]:
        try:
            body = OpenEnvReset.model_validate(data)
        except ValidationError as exc:
            error = most_telling(exc.errors(include_url=False))
            raise invalid(error, where="data", known=OpenEnvReset.model_fields) from exc
        if self._found is not None and body.config is None:
            await self._found.reset(body)
        else:
            before, self._found = self._found, None
            if before is not None and not self._joined:
                before.end()
            self._found = await OpenEnvSession.start(self._services, self._env_name, body)
            self._joined = False
        return self._found.shown(ignored=ignored_keys(body))

    async def _step(self, data: dict[str, Any]) -> dict[str, Any]:
        if self._found is None:
            raise EpisodeOver("no episode was started", hint="send a reset first")
        return await self._found.step(data, where="data", ignored=[])

    def _state(self) -> dict[str, Any]:
        return dict(NO_EPISODE) if self._found is None else self._found.state()

    def end(self) -> None:
        """Forget the environment that this socket made; one that it joined stays."""
        if self._found is not None and not self._joined:
            self._found.end()


@router.websocket("/openenv/{env_name}/ws")
async def socket(websocket: WebSocket, env_name: str) -> None:
    """Serve one client until it leaves, is idle for too long, or its session has expired."""
    await websocket.accept()
    services: Services = websocket.app.state.services
    sockets: Sockets = websocket.app.state.openenv_sockets
    # OpenEnv tells why it refuses in a frame, which its client shows; an HTTP status it would not.
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


def _read(text: str, max_bytes: int) -> tuple[str, dict[str, Any]]:
    if len(text) > max_bytes:
        raise InvalidRequest(f"a message of {len(text)} characters; at most {max_bytes}", where="message")
    try:
        message = read_json(text)
    except ValueError as exc:
        hint = "send it as a text frame"
        raise InvalidRequest(str(exc), where="message", hint=hint, code="invalid_json") from exc
    kind = message.get("type", "") if isinstance(message, dict) else ""
    if kind not in KINDS:
        shown = clipped(str(kind))
        known = ", ".join(KINDS)
        raise InvalidRequest(
            f"unknown message type {shown!r}; known: {known}", where="type", code="unknown_type"
        )
    data = message.get("data", {})
    if not isinstance(data, dict):
        raise InvalidRequest("data is no JSON object", where="data")
    return kind, data


def error_frame(error: TaskAppError) -> str:
    """An error as OpenEnv's client reads it: `message` and `code`; `where` and `hint` stand beside them."""
    internal = isinstance(error, CriticalError)
    detail = "a plug-in of this task app failed; its log says how" if internal else encodable(error.detail)
    data = {
        "message": f"{detail} ({error.hint})" if error.hint else detail,
        "code": _code(error),
        "problem": error.code,
        "where": error.where and encodable(error.where),
    }
    return _frame("error", data)


def _code(error: TaskAppError) -> str:
    if error.code in ("invalid_json", "unknown_type"):
        return error.code.upper()
    return next((code for kind, code in _CODES if isinstance(error, kind)), "EXECUTION_ERROR")


def _frame(kind: str, data: dict[str, Any]) -> str:
    return bytes(ReplyJSON({"type": kind, "data": data}).body).decode()
