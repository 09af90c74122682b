"""What a request may say, as ASGI middleware: an address and a JSON body that everybody after it can hold.

It stands inside the gate, which bounds the body in bytes and time, and before all that reads one. What it
lets through can be stored, logged and sent back (shared_schemas.json_text): no route looks for that again.
"""

from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared_schemas.json_text import NUL, read_json, says_json
from task_app.errors import BodyTooLarge, InvalidRequest, TaskAppError, TooSlow
from task_app.guards.gate import refuse

# In a scope: the value of its JSON body, for task_app.short_way, which takes it out.
JSON_BODY = "turnwise.json_body"


class Content:
    """Wraps the app: 422 for what nobody could hold, with its place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        try:
            _check_address(scope)
            if scope["type"] == "http" and scope["method"] == "POST" and _says_json(scope):
                body = await whole_body(receive)
                if body:
                    scope[JSON_BODY] = _read(body)
                receive = given(body, receive)
        except TaskAppError as error:
            await refuse(error, scope, receive, send)
            return
        await self._app(scope, receive, send)


async def whole_body(receive: Receive) -> bytes:
    """The body, which the gate's receive channel bounds in bytes and time.

    Raises:
        BodyTooLarge, TooSlow, InvalidRequest: it did not come.
    """
    body = bytearray()
    while True:
        try:
            message = await receive()
        except HTTPException as exc:
            raise (TooSlow if exc.status_code == 408 else BodyTooLarge)(exc.detail, where="body") from exc
        if message["type"] == "http.disconnect":
            # A body that was cut short by its sender: nobody is there to answer, nothing was done.
            raise InvalidRequest("the connection closed before the body was complete", where="body")
        body += message.get("body", b"")
        if not message.get("more_body", False):
            return bytes(body)


def given(body: bytes, receive: Receive) -> Receive:
    """A receive channel that gives the body, read already, and then what the client does."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return parts.pop() if parts else await receive()

    return channel


def _check_address(scope: Scope) -> None:
    if "\0" in scope["path"]:
        raise InvalidRequest(f"the path holds {NUL}", where="path")
    if b"%00" in scope["query_string"]:
        raise InvalidRequest(f"the query holds {NUL}", where="query")


def _says_json(scope: Scope) -> bool:
    """As FastAPI reads a content type; what is none is refused by the route."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"content-type":
            return says_json(value)
    return False


def _read(body: bytes) -> Any:
    try:
        return read_json(body)
    except ValueError as exc:
        raise InvalidRequest(str(exc), where="body") from exc
