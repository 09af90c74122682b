"""The gate of a service, as ASGI middleware: it checks the key, the origin, the body and the time of a
request.

It stands before routing and before any body is read, so a stranger learns nothing, not even which paths
exist. Whatever passes can be stored, logged and sent back (shared_schemas.json_text); no route checks that
again.
"""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlsplit

from starlette.requests import ClientDisconnect
from starlette.responses import RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocketClose

from service_kit.errors import (
    BodyTooLarge,
    Forbidden,
    MalformedRequest,
    NoKeyConfigured,
    RequestDeadline,
    ServiceError,
    TooSlow,
    Unauthorised,
)
from service_kit.keys import Keys, RawHeaders, basic_passwords, presented_keys
from service_kit.problems import BodyError, Respond, problem_response
from shared_schemas.json_text import NUL, read_json
from shared_schemas.urls import host_name, is_loopback

Result = TypeVar("Result")

DENIAL = "websocket.http.response"
# Key in a scope's extensions: the body has arrived, so reading needs no timeout (service_kit.connections).
WHOLE_BODY = "turnwise.whole_body"
# Key in a scope's extensions: the `Leaving` of its client (service_kit.connections).
LEAVING = "turnwise.leaving"
# Key in a scope: the value of its JSON body, for the first reader.
JSON_BODY = "turnwise.json_body"
# RFC 6455: the endpoint refuses because of its own policy.
POLICY_VIOLATION = 1008
_BASIC = 'Basic realm="turnwise: any name, the key as password", charset="UTF-8"'
# Browsers send at least one of them with every POST and every socket.
_BY_A_BROWSER = frozenset({b"origin", b"sec-fetch-site"})
# What proxies and tunnels add; that a Host names this machine says nothing there.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_TooLarge = Callable[[], BodyTooLarge]


class KeyDoor:
    """Accepts requests with a key; a browser may send it as the password of `Authorization: Basic`.

    A browser also adds that password to requests that other sites make it send. Such sites cannot read a
    GET's reply, but they could act by a POST and use a socket, so Basic counts for neither if a browser sends
    it. Without a browser it counts for POSTs below `basic_posts`, whose clients know a URL and no header.
    Where there are no keys and none is needed, only this machine may send requests, and no foreign page.

    `open_paths`, and what lies below `open_below`, need no key.
    """

    def __init__(
        self,
        keys: Keys,
        *,
        open_paths: Collection[str],
        open_below: Collection[str] = (),
        basic_posts: str | None = None,
        unauthorised: type[ServiceError] = Unauthorised,
    ) -> None:
        self._keys, self._basic_posts, self._unauthorised = keys, basic_posts, unauthorised
        self._open_paths = frozenset(open_paths)
        self._open_below = tuple([f"{path}/" for path in open_below])

    def error(self, scope: Scope) -> ServiceError | None:
        """Why this request may not enter; None if it may."""
        if self._is_open(scope["path"]):
            return None
        if not self._keys.configured:
            if self._keys.needed:
                return NoKeyConfigured(self._keys.variable)
            return proxy_error(scope, self._keys) or origin_error(scope, self._keys)
        credentials = self.credentials(scope)
        return None if self._keys.match(credentials) else no_key(self._keys, credentials, self._unauthorised)

    def page(self, scope: Scope, response: Response) -> Response:
        """The reply to a person's browser instead of a 401."""
        response.headers["WWW-Authenticate"] = _BASIC
        return response

    def credentials(self, scope: Scope) -> RawHeaders:
        """The headers, with the password of Basic as a key if it counts."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD"):
            if not _BY_A_BROWSER.isdisjoint(name for name, _ in headers):
                return headers
            below = self._basic_posts
            if scope["type"] == "http" and (below is None or not scope["path"].startswith(below)):
                return headers
        return [*headers, *((b"x-api-key", key) for key in basic_passwords(headers))]

    def _is_open(self, path: str) -> bool:
        return path in self._open_paths or f"{path}/".startswith(self._open_below)


class SessionDoor:
    """Accepts requests with the key, or with the cookie that the log-in page gives for it.

    Pages of other sites may send nothing. Without a key only this machine may send requests, through no proxy
    and by its own host names: otherwise a foreign name that points at 127.0.0.1 would make a foreign page
    same-origin. `has_session` tells whether the headers hold that cookie; to the path `login` a person's
    browser is redirected.
    """

    def __init__(
        self,
        keys: Keys,
        has_session: Callable[[RawHeaders], bool],
        *,
        open_paths: Collection[str],
        open_below: Collection[str],
        login: str,
    ) -> None:
        self._keys, self._has_session = keys, has_session
        self._open_paths, self._open_below, self._login = open_paths, tuple(open_below), login

    def error(self, scope: Scope) -> ServiceError | None:
        if self._keys.match(scope["headers"]):
            return None
        if not self._keys.configured and (error := proxy_error(scope, self._keys)):
            return error
        if error := origin_error(scope, self._keys):
            return error
        is_open = scope["path"] in self._open_paths or scope["path"].startswith(self._open_below)
        if self._keys.configured and not is_open and not self._has_session(scope["headers"]):
            return no_key(self._keys, scope["headers"])
        return None

    def page(self, scope: Scope, response: Response) -> Response:
        query = scope.get("query_string", b"").decode("latin-1")
        path = f"{scope['path']}?{query}" if query else str(scope["path"])
        return RedirectResponse(f"{self._login}?next={quote(path)}", 303)


def proxy_error(scope: Scope, keys: Keys) -> ServiceError | None:
    """Why a request that a proxy passes on may not enter a service without keys: its sender is unknown."""
    names = sorted(_FORWARDED.intersection(name for name, _ in scope["headers"]))
    if not names:
        return None
    return Forbidden(
        "a proxy passes this request on, and without a key only this machine may ask",
        where=f"header {names[0].decode()}",
        hint=f"Set {keys.variable}.",
    )


def origin_error(scope: Scope, keys: Keys) -> ServiceError | None:
    """Why a request comes from another site, or from another machine though there is no key; else None."""
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    if not keys.configured and not names_this_machine(host):
        return Forbidden(
            f"Host is {host[:100]!r}, and without a key only this machine may ask, by its own names",
            where="header Host",
            hint=f"Ask http://127.0.0.1 or http://localhost, or set {keys.variable}.",
        )
    # A socket can act, like a POST.
    if is_cross_site(scope.get("method", "POST"), headers):
        return Forbidden("the page of another site sent this request", where="header Origin")
    return None


def no_key(keys: Keys, headers: RawHeaders, kind: type[ServiceError] = Unauthorised) -> ServiceError:
    """The error of a request without a valid key."""
    return kind(
        "another key was given" if presented_keys(headers) else "no key was given",
        where="header X-API-Key",
        hint=f"Send the {keys.variable} as X-API-Key or Authorization: Bearer.",
    )


class Gate:
    """Wraps the app, and refuses faulty requests before it.

    400 without one Host header, 401 or 503 without a valid key, 403 if the door forbids it, 413 for a body
    that is too large, 408 for one that is too slow, 422 for a URL or JSON body that cannot be stored.

    A JSON body that `read` cannot store is `unreadable`, which it says by a ValueError; with None only routes
    read bodies. `large_body_hint` is advice to the sender of a body that is too large.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        door: KeyDoor | SessionDoor,
        max_body_bytes: int,
        max_body_s: float,
        unreadable: type[ServiceError] | None,
        read: Callable[[Scope, bytes], Any] = lambda scope, body: read_json(body),
        respond: Respond = problem_response,
        large_body_hint: str | None = None,
    ) -> None:
        self._app, self._door, self._respond = app, door, respond
        self._max_body_bytes, self._max_body_s = max_body_bytes, max_body_s
        self._unreadable, self._read, self._large_body_hint = unreadable, read, large_body_hint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        error = self._error(scope)
        if error is None and scope["type"] == "http":
            receive = _BoundedBody(scope, receive, self._max_body_s, self._max_body_bytes, self._too_large)
            if self._unreadable is not None and _says_json(scope):
                try:
                    body = await whole_body(receive)
                    receive = receive_with_body(body, receive)
                    if body:
                        scope[JSON_BODY] = self._read(scope, body)
                except ValueError as fault:
                    error = self._unreadable(str(fault), where="body")
                except ServiceError as refusal:
                    error = refusal
                except ClientDisconnect:
                    return
        if error is None:
            await self._app(scope, receive, send)
        else:
            await self._refuse(error, scope, receive, send)

    def plain_value(self, scope: Scope, body: bytes) -> Any:
        """The value of a whole JSON body; None if it is null, or for anything wrong, which a call refuses."""
        if len(body) > self._max_body_bytes or not _says_json(scope) or self._error(scope) is not None:
            return None
        try:
            return self._read(scope, body)
        except ValueError:
            return None

    def _error(self, scope: Scope) -> ServiceError | None:
        """Why the request may not enter, as far as its head tells."""
        return (
            _host_error(scope)
            or self._door.error(scope)
            or self._address_error(scope)
            or self._length_error(scope)
        )

    def _address_error(self, scope: Scope) -> ServiceError | None:
        kind = self._unreadable
        if kind is not None and "\0" in scope["path"]:
            return kind(f"the path holds {NUL}", where="path")
        if kind is not None and b"%00" in scope["query_string"]:
            return kind(f"the query holds {NUL}", where="query")
        return None

    def _length_error(self, scope: Scope) -> ServiceError | None:
        for name, value in scope["headers"]:
            if name == b"content-length" and value.isdigit() and int(value) > self._max_body_bytes:
                return self._too_large(int(value))
        return None

    def _too_large(self, length: int | None = None) -> BodyTooLarge:
        size = "is larger than" if length is None else f"has {length} bytes, which is more than"
        return BodyTooLarge(
            f"the body {size} {self._max_body_bytes} bytes", where="body", hint=self._large_body_hint
        )

    async def _refuse(self, error: ServiceError, scope: Scope, receive: Receive, send: Send) -> None:
        """Reply with the error; a WebSocket without HTTP replies is closed before it opens."""
        if scope["type"] == "http" or DENIAL in scope.get("extensions", {}):
            response = self._respond(error)
            if error.status == 401 and asks_for_a_page(scope):
                response = self._door.page(scope, response)
            await response(scope, receive, send)
        else:
            await WebSocketClose(POLICY_VIOLATION, error.code)(scope, receive, send)


def _host_error(scope: Scope) -> ServiceError | None:
    """Why the request names no host, or leaves open which of two. RFC 9112, section 3.2.

    HTTP/1.0 knows no Host. Of two, a proxy may read another one than we do.
    """
    count = [name for name, _ in scope["headers"]].count(b"host")
    if count > 1:
        return MalformedRequest(f"there are {count} Host headers, where one is allowed", where="header Host")
    if not count and scope.get("http_version") == "1.1":
        return MalformedRequest("there is no Host header, which HTTP/1.1 needs", where="header Host")
    return None


class Leaving:
    """Tells that a client's connection is lost, at once and to those who ask later."""

    def __init__(self) -> None:
        self._calls: set[Callable[[], None]] | None = set()

    def add(self, call: Callable[[], None]) -> None:
        """Call this when the client leaves, or now if it has left."""
        if self._calls is None:
            call()
        else:
            self._calls.add(call)

    def discard(self, call: Callable[[], None]) -> None:
        if self._calls is not None:
            self._calls.discard(call)

    def tell(self) -> None:
        calls, self._calls = self._calls or (), None
        for call in calls:
            call()


class _BoundedBody:
    """A receive channel with limits on the body's size and time."""

    def __init__(
        self, scope: Scope, receive: Receive, most_s: float, most_bytes: int, too_large: _TooLarge
    ) -> None:
        self._scope, self._receive, self._too_large = scope, receive, too_large
        self._most_s, self._rest_bytes = most_s, most_bytes
        self._until_s = 0.0 if self._is_whole else asyncio.get_running_loop().time() + most_s
        self._complete = False

    async def __call__(self) -> Message:
        if self._complete:
            return await self._receive()
        message = await (self._receive() if self._is_whole else self._in_time())
        self._complete = not message.get("more_body", False)
        self._rest_bytes -= len(message.get("body", b""))
        if self._rest_bytes < 0:
            raise BodyError(self._too_large())
        return message

    @property
    def leaving(self) -> Leaving | None:
        """What tells that the client has left; None if the server has nothing of the kind."""
        found: Leaving | None = self._scope.get("extensions", {}).get(LEAVING)
        return found

    @property
    def _is_whole(self) -> bool:
        """Whether the body has arrived, so that the time is no matter."""
        return WHOLE_BODY in self._scope.get("extensions", ())

    async def _in_time(self) -> Message:
        try:
            async with asyncio.timeout_at(self._until_s):
                return await self._receive()
        except TimeoutError as error:
            late = TooSlow(f"the body was not complete after {self._most_s:g} s", where="body")
            raise BodyError(late) from error


async def whole_body(receive: Receive) -> bytes:
    """The body, within the limits of the gate's receive channel."""
    body = bytearray()
    while True:
        try:
            message = await receive()
        except BodyError as refusal:
            raise refusal.error from refusal
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        part: bytes = message.get("body", b"")
        is_last = not message.get("more_body", False)
        if is_last and not body:
            return part
        body += part
        if is_last:
            return bytes(body)


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """The result of the work. Raises ClientDisconnect if the client leaves first, which cancels the work.

    The work runs in the caller's task. Where the server does not call back (`LEAVING`), another task asks it.
    """

    def cancel() -> None:
        scope.reschedule(0.0)  # a time that is over: this cancels the work

    async def cancel_on_disconnect() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        cancel()

    leaving: Leaving | None = getattr(receive, "leaving", None)
    try:
        async with asyncio.timeout(None) as scope:
            if leaving is None:
                watch = asyncio.create_task(cancel_on_disconnect())
            else:
                leaving.add(cancel)
            try:
                return await work
            finally:
                if leaving is None:
                    watch.cancel()
                else:
                    leaving.discard(cancel)
    except TimeoutError:
        if not scope.expired():
            raise
        raise ClientDisconnect from None


def receive_with_body(body: bytes, receive: Receive) -> Receive:
    """A receive channel that returns a body that was read already, then the client's further messages."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return parts.pop() if parts else await receive()

    return channel


def _says_json(scope: Scope) -> bool:
    """Whether FastAPI would read the body as JSON, by the first content type; it also strips U+00A0 and
    U+0085."""
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"content-type":
            if value == b"application/json":
                return True
            main, _, kind = value.decode("latin-1").partition(";")[0].strip().lower().partition("/")
            return main == "application" and (kind == "json" or kind.endswith("+json"))
    return False


def asks_for_a_page(scope: Scope) -> bool:
    """Whether a person's browser sends the request."""
    return scope.get("method") == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b"")


def names_this_machine(host: str) -> bool:
    """Whether a Host header names the loopback; other names can be pointed at this machine by a stranger."""
    name = host_name(host)
    return name is not None and is_loopback(name)


def is_cross_site(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether the page of another site makes a browser send this; following a link does not count.

    Newer browsers say so in Sec-Fetch-Site; for the others Origin tells. Programs send neither.
    """
    site = headers.get(b"sec-fetch-site", b"").decode("latin-1")
    if site:
        is_link = method in _SAFE and headers.get(b"sec-fetch-mode") == b"navigate"
        return site not in ("same-origin", "none") and not is_link
    origin = headers.get(b"origin")
    if origin is None:
        return False
    try:
        place = urlsplit(origin.decode("latin-1")).netloc.lower()  # empty for `null` and the like
    except ValueError:
        return True
    return place != headers.get(b"host", b"").decode("latin-1").lower()


class Deadline:
    """Wraps the app: 504 if no reply has begun `at_most_s` seconds after the request.

    The work itself continues: a session is locked until its step is complete, and a retry with the same
    Idempotency-Key gets the reply. The `long` paths have limits of their own.
    """

    def __init__(self, app: ASGIApp, *, at_most_s: float, long: Collection[str]) -> None:
        self._app, self._at_most_s, self._long = app, at_most_s, frozenset(long)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in self._long:
            await self._app(scope, receive, send)
            return
        loop, has_begun = asyncio.get_running_loop(), False
        late_reply: asyncio.Future[None] | None = None

        async def send_in_time(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            if late_reply is None:
                await send(message)

        def give_up() -> None:
            nonlocal late_reply
            if not has_begun:
                error = RequestDeadline(
                    f"no answer within {self._at_most_s:g} s; the request may still be carried out",
                    where=scope["path"],
                    hint="a retry with the same Idempotency-Key waits for it and gets its answer",
                )
                late_reply = loop.create_task(problem_response(error)(scope, receive, send))

        # A timer and not a task, because it costs next to nothing.
        timer = loop.call_later(self._at_most_s, give_up)
        try:
            await self._app(scope, receive, send_in_time)
        finally:
            timer.cancel()
