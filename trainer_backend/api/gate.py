"""The door of the service, as ASGI middleware: who may come in, from where, with how much, in what time.

It stands before routing and before any body is read: a stranger learns nothing, not even which paths exist.
"""

import asyncio
from urllib.parse import quote

from starlette.datastructures import MutableHeaders
from starlette.exceptions import HTTPException
from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from shared_schemas.json_text import NUL, read_json, says_json
from trainer_backend.api.auth import Keys
from trainer_backend.api.errors import ApiError, BodyTooLarge, Forbidden, Unauthorised
from trainer_backend.api.origins import is_cross_site, names_this_machine
from trainer_backend.api.problems import problem_response
from trainer_backend.errors import TrainerError

LOGIN = "/login"
# What needs no key: whether the service lives, and what its log-in page is made of.
OPEN_PATHS = frozenset({"/health", LOGIN})
_OPEN_FILES = "/static/"
_POLICY_VIOLATION = 1008  # RFC 6455


class Gate:
    """Wraps the app: 401 without a good key (a person's browser: the log-in page), 403 for requests of other
    sites' pages, 413 for a body that is too large, 408 for one too slow, 422 for text that none can keep."""

    def __init__(self, app: ASGIApp, *, keys: Keys, max_body_bytes: int, max_body_s: float) -> None:
        self._app, self._keys = app, keys
        self._max_body_bytes, self._max_body_s = max_body_bytes, max_body_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await WebSocketClose(_POLICY_VIOLATION)(scope, receive, send)
        elif (error := self._error(scope)) is None:
            counted = _Counted(receive, self._max_body_bytes, self._max_body_s)
            body = _json_of(counted) if _says_json(scope) else counted
            await self._app(scope, body, _as_it_says(send))
        elif isinstance(error, Unauthorised) and _asks_for_a_page(scope):
            await RedirectResponse(f"{LOGIN}?next={quote(_path_of(scope))}", 303)(scope, receive, send)
        else:
            await problem_response(error)(scope, receive, send)

    def _error(self, scope: Scope) -> TrainerError | None:
        headers = dict(scope["headers"])
        if self._keys.in_headers(scope["headers"]):
            return self._content_error(scope, headers)
        host = headers.get(b"host", b"").decode("latin-1")
        if not self._keys.configured and not names_this_machine(host):
            return Forbidden(
                f"Host is {host[:100]!r}, and without a key only this machine may ask, by its own names",
                where="header Host",
                hint="Ask http://127.0.0.1 or http://localhost, or give the service a TRAINER_API_KEY.",
            )
        if is_cross_site(scope["method"], headers):
            return Forbidden("the page of another site sent this request", where="header Origin")
        opened = scope["path"] in OPEN_PATHS or scope["path"].startswith(_OPEN_FILES)
        if self._keys.configured and not opened and not self._keys.in_cookie(scope["headers"]):
            return Unauthorised(
                "no valid API key in this request",
                where="header X-API-Key",
                hint="Send the service's TRAINER_API_KEY as X-API-Key or Authorization: Bearer.",
            )
        return self._content_error(scope, headers)

    def _content_error(self, scope: Scope, headers: dict[bytes, bytes]) -> TrainerError | None:
        if "\0" in scope["path"] or b"%00" in scope["query_string"]:
            return ApiError(f"the address holds {NUL}", where="path")
        length = headers.get(b"content-length", b"0")
        most = self._max_body_bytes
        return _too_large(most) if length.isdigit() and int(length) > most else None


class _Counted:
    """A receive channel that hands on no more than `at_most` bytes of a body, and waits for it so long."""

    def __init__(self, receive: Receive, at_most: int, at_most_s: float) -> None:
        self._receive, self._left, self._at_most, self._at_most_s = receive, at_most, at_most, at_most_s
        self._until_s = asyncio.get_running_loop().time() + at_most_s
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        try:
            async with asyncio.timeout_at(self._until_s):
                message = await self._receive()
        except TimeoutError as error:
            raise HTTPException(408, f"the body was not complete after {self._at_most_s:g} s") from error
        self._complete = not message.get("more_body", False)
        self._left -= len(message.get("body", b""))
        if self._left < 0:
            # An HTTPException is the one kind that FastAPI's body reader lets through as it is.
            raise HTTPException(413, _too_large(self._at_most).detail)
        return message


def _json_of(receive: Receive) -> Receive:
    """A receive channel that hands a JSON body on once it has been read: what is in it can be stored, logged
    and sent back, and no route looks for that again."""
    at_hand: list[Message] = []

    async def channel() -> Message:
        if at_hand:
            return await receive()
        parts, more = [], True
        while more:
            message = await receive()
            if message["type"] != "http.request":
                return message
            parts.append(message.get("body", b""))
            more = message.get("more_body", False)
        body = b"".join(parts)
        try:
            if body:
                read_json(body)
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        at_hand.append({"type": "http.request", "body": body, "more_body": False})
        return at_hand[0]

    return channel


def _says_json(scope: Scope) -> bool:
    """As FastAPI takes a content type, the first of several."""
    return says_json(next((value for name, value in scope["headers"] if name == b"content-type"), b""))


def _as_it_says(send: Send) -> Send:
    """No browser takes an answer for another kind than it says that it is: a log for a page."""

    async def sent(message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = MutableHeaders(scope=message)
            headers.setdefault("X-Content-Type-Options", "nosniff")
        await send(message)

    return sent


def _too_large(at_most: int) -> BodyTooLarge:
    return BodyTooLarge(f"the body is larger than {at_most} bytes", where="body")


def _asks_for_a_page(scope: Scope) -> bool:
    return scope["method"] == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b"")


def _path_of(scope: Scope) -> str:
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{scope['path']}?{query}" if query else str(scope["path"])
