"""The door of the service, as ASGI middleware: who may come in, with how much, and in what time.

It stands before routing and before any body is read: a stranger learns nothing, not even which paths exist.
"""

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from task_app.errors import BodyTooLarge, NoKeyConfigured, TaskAppError, TooSlow, Unauthorised
from task_app.guards.auth import Keys, asks_for_a_page, credentials
from task_app.routes.problems import problem_response

OPEN_PATHS = frozenset({"/", "/health"})
LOGIN = 'Basic realm="turnwise: any name, the key as password", charset="UTF-8"'
DENIAL = "websocket.http.response"
# Among a scope's extensions: the body has come, and nobody has to wait for it (task_app.guards.connections).
WHOLE_BODY = "turnwise.whole_body"
# RFC 6455: the endpoint refuses because of a policy of its own.
POLICY_VIOLATION = 1008


class Gate:
    """Wraps the app: 401 or 503 without a good key, 413 for a body that is too large, 408 for one too slow.

    WebSockets need a key as every other request does.
    """

    def __init__(self, app: ASGIApp, *, keys: Keys, max_body_bytes: int, max_body_s: float) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes
        self._max_body_s = max_body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        error = self._key_error(scope) or self._length_error(scope)
        if error is not None:
            await refuse(error, scope, receive, send)
        elif scope["type"] == "http":
            await self._app(scope, _Counted(scope, receive, self._max_body_bytes, self._max_body_s), send)
        else:
            await self._app(scope, receive, send)

    def _key_error(self, scope: Scope) -> TaskAppError | None:
        if scope["path"] in OPEN_PATHS or self._keys.opened(scope["path"]):
            return None
        if not self._keys.configured:
            return NoKeyConfigured()
        if not self._keys.match(credentials(scope)):
            return Unauthorised(
                "no valid API key in this request",
                where="header X-API-Key",
                hint="send the task app's ENVIRONMENT_API_KEY as X-API-Key or Authorization: Bearer",
            )
        return None

    def _length_error(self, scope: Scope) -> TaskAppError | None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body_bytes:
                return too_large(self._max_body_bytes, declared=int(value))
        return None


class _Counted:
    """A receive channel that hands on no more than `at_most` bytes of a body, and waits for it so long."""

    def __init__(self, scope: Scope, receive: Receive, at_most: int, at_most_s: float) -> None:
        self._scope = scope
        self._receive = receive
        self._left = at_most
        self._at_most = at_most
        self._at_most_s = at_most_s
        self._until_s = asyncio.get_running_loop().time() + at_most_s
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        message = await self._in_time()
        self._complete = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # An HTTPException is the one kind that FastAPI's body reader lets through as it is.
            raise HTTPException(413, too_large(self._at_most).detail)
        return message

    async def _in_time(self) -> Message:
        if WHOLE_BODY in self._scope.get("extensions", ()):
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._receive()
        except TimeoutError as exc:
            raise HTTPException(408, too_slow(self._at_most_s).detail) from exc


async def refuse(error: TaskAppError, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer with the error; a WebSocket that cannot be told over HTTP is closed before it opens."""
    if scope["type"] == "http" or DENIAL in scope.get("extensions", {}):
        response = problem_response(error)
        if isinstance(error, Unauthorised) and asks_for_a_page(scope):
            response.headers["WWW-Authenticate"] = LOGIN
        await response(scope, receive, send)
    else:
        await WebSocketClose(POLICY_VIOLATION, error.code)(scope, receive, send)


def too_large(at_most: int, *, declared: int | None = None) -> BodyTooLarge:
    found = "is larger than" if declared is None else f"has {declared} bytes, which is more than"
    return BodyTooLarge(f"the body {found} {at_most} bytes")


def too_slow(at_most_s: float) -> TooSlow:
    return TooSlow(f"the body was not complete after {at_most_s:g} s", where="body")
