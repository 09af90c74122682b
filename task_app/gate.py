"""The door of the service, as ASGI middleware: who may come in, and with how much.

It stands before routing and before any body is read: a stranger learns nothing, not even which paths exist.
"""

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from task_app.auth import Keys
from task_app.errors import BodyTooLarge, NoKeyConfigured, TaskAppError, Unauthorised
from task_app.routes.problems import problem_response

OPEN_PATHS = frozenset({"/", "/health"})


class Gate:
    """Wraps the app: 401 or 503 without a good key, 413 for a body above `max_body_bytes`."""

    def __init__(self, app: ASGIApp, *, keys: Keys, max_body_bytes: int) -> None:
        self._app = app
        self._keys = keys
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        error = self._key_error(scope) or self._length_error(scope)
        if error is not None:
            await problem_response(error)(scope, receive, send)
            return
        await self._app(scope, _Counted(receive, self._max_body_bytes), send)

    def _key_error(self, scope: Scope) -> TaskAppError | None:
        if scope["path"] in OPEN_PATHS:
            return None
        if not self._keys.configured:
            return NoKeyConfigured()
        if not self._keys.match(scope["headers"]):
            return Unauthorised(
                "no valid API key in this request",
                where="header X-API-Key",
                hint="send the task app's ENVIRONMENT_API_KEY as X-API-Key or Authorization: Bearer",
            )
        return None

    def _length_error(self, scope: Scope) -> TaskAppError | None:
        lengths = [value for name, value in scope["headers"] if name == b"content-length"]
        if any(int(value) > self._max_body_bytes for value in lengths if value.isdigit()):
            return too_large(self._max_body_bytes)
        return None


class _Counted:
    """A receive channel that refuses to hand on more than `at_most` bytes of a body without a length."""

    def __init__(self, receive: Receive, at_most: int) -> None:
        self._receive = receive
        self._left = at_most
        self._at_most = at_most

    async def __call__(self) -> Message:
        message = await self._receive()
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # An HTTPException is the one kind that FastAPI's body reader lets through as it is.
            raise HTTPException(413, too_large(self._at_most).detail)
        return message


def too_large(at_most: int) -> BodyTooLarge:
    return BodyTooLarge(
        f"the body is larger than {at_most} bytes", where="body", hint="send it in several requests"
    )
