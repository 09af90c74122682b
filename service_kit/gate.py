"""ASGI middleware that checks the API key, the origin, the body and the duration of each request.

`Gate` runs before routing and before the body is read, so a client without a key cannot even find out which
paths exist. `Gate` also refuses a JSON body with text that cannot be stored, logged or sent back
(shared_schemas.json_text), so routes need not check for such text.
"""

import asyncio
import re
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
from shared_schemas.urls import HOST, is_loopback

Result = TypeVar("Result")

DENIAL = "websocket.http.response"
# This key in a scope's extensions means that the whole body has arrived, so that reading the body needs no
# time limit. service_kit.connections sets the key.
WHOLE_BODY = "turnwise.whole_body"
# The value under this key in a scope's extensions is the client's `Leaving`, set by service_kit.connections.
LEAVING = "turnwise.leaving"
# The value under this key in a scope is the parsed JSON body; the route that uses it first removes it.
JSON_BODY = "turnwise.json_body"
# Close code of a WebSocket that the server refuses because of its policy (RFC 6455).
POLICY_VIOLATION = 1008
_BASIC = 'Basic realm="turnwise: any name, the key as password", charset="UTF-8"'
# Browsers send at least one of these headers with every POST and every WebSocket.
_BY_A_BROWSER = frozenset({b"origin", b"sec-fetch-site"})
# Headers that proxies and tunnels add. A request through a proxy may name this machine in its Host header
# although the client is elsewhere.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_TooLarge = Callable[[], BodyTooLarge]


class KeyDoor:
    """A door decides for `Gate` which requests to accept; this door accepts those with a valid API key.

    The key may be in one of the headers that `presented_keys` reads. In some requests, the key may also be
    the password of `Authorization: Basic`. A browser repeats a Basic password even in requests that a page of
    another site triggers. That page cannot read the reply to a GET, but a POST or a WebSocket could change
    something. Therefore Basic is accepted in

        GET and HEAD requests
        WebSockets that no browser opened
        other requests that no browser sent, to paths that begin with `basic_posts`

    The last group exists for clients whose users can configure a URL, which may contain a password, but no
    header.

    If the service has no keys and needs none, the door accepts requests from this machine only, unless a page
    of another site sent them. Requests to `open_paths`, and to paths below `open_below`, need no key.
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
        """Return the error with which to refuse the request, or None to accept the request."""
        if self._is_open(scope["path"]):
            return None
        if not self._keys.configured:
            if self._keys.needed:
                return NoKeyConfigured(self._keys.variable)
            return proxy_error(scope, self._keys) or origin_error(scope, self._keys)
        credentials = self.credentials(scope)
        return None if self._keys.match(credentials) else no_key(self._keys, credentials, self._unauthorised)

    def page(self, scope: Scope, response: Response) -> Response:
        """Return the reply for a browser that requested a page but sent no valid key.

        `response` is the reply with status 401 that other clients would get.
        """
        response.headers["WWW-Authenticate"] = _BASIC
        return response

    def credentials(self, scope: Scope) -> RawHeaders:
        """Return the request's headers, and where Basic is allowed, add its password as X-API-Key."""
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
    """A door (see `KeyDoor`) that accepts requests with a valid API key or the cookie of the log-in page.

    Without a valid key, a request is refused if a page of another site sent it. A browser that requests a
    page without the cookie is redirected to the path `login`.

    If the service has no keys, the door accepts only requests from this machine that no proxy forwarded and
    whose Host header names this machine. The last condition is needed because another site could let its own
    host name resolve to 127.0.0.1; a browser would then treat pages of that site as pages of this service.

    Args:
        has_session: returns whether a request's headers contain a valid cookie.
        open_paths: paths that need neither key nor cookie.
        open_below: prefixes of further such paths.
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
    """Return an error if a proxy forwarded the request, else None.

    Call this in a service without keys, which must know that the client runs on this machine.
    """
    names = sorted(_FORWARDED.intersection(name for name, _ in scope["headers"]))
    if not names:
        return None
    return Forbidden(
        "a proxy passes this request on, and without a key only this machine may ask",
        where=f"header {names[0].decode()}",
        hint=f"Set {keys.variable}.",
    )


def origin_error(scope: Scope, keys: Keys) -> ServiceError | None:
    """Return an error if a page of another site sent the request, else None.

    In a service without keys, also return an error if the Host header does not name this machine.
    """
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    name_and_port = re.fullmatch(HOST, host)
    # Only loopback names are safe: anyone can register a host name that resolves to 127.0.0.1.
    if not keys.configured and (name_and_port is None or not is_loopback(name_and_port[1])):
        return Forbidden(
            f"Host is {host[:100]!r}, and without a key only this machine may ask, by its own names",
            where="header Host",
            hint=f"Ask http://127.0.0.1 or http://localhost, or set {keys.variable}.",
        )
    # A WebSocket's scope has no method. Check it like a POST, because it can change something.
    if is_cross_site(scope.get("method", "POST"), headers):
        return Forbidden("the page of another site sent this request", where="header Origin")
    return None


def no_key(keys: Keys, headers: RawHeaders, kind: type[ServiceError] = Unauthorised) -> ServiceError:
    """Return an error of the class `kind` for a request without a valid key."""
    return kind(
        "another key was given" if presented_keys(headers) else "no key was given",
        where="header X-API-Key",
        hint=f"Send the {keys.variable} as X-API-Key or Authorization: Bearer.",
    )


class Gate:
    """ASGI middleware that refuses invalid requests and passes all others to the app.

    The status of a refusal is

        400   if there is not exactly one Host header
        401   if the key is missing or wrong; 503 if the service should have a key but has none
        403   if the door forbids the origin of the request
        408   if the body is not complete after `max_body_s`
        413   if the body is larger than `max_body_bytes`
        422   if the URL or the JSON body contains text that cannot be stored

    Args:
        door: decides whether the sender of a request is accepted.
        unreadable: class of the error for a URL or a JSON body that is refused. If None, the gate does not
            read bodies, and each route reads its own.
        read: parses a JSON body; raises ValueError to refuse the body.
        respond: makes the reply to an error.
        large_body_hint: advice that is sent to a client whose body is too large.
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
        """Check a request that bypasses the app, and return its parsed JSON body.

        Return None if the gate would refuse the request, if the body is not declared as JSON, or if it is
        `null`. The app has to answer these requests.
        """
        if len(body) > self._max_body_bytes or not _says_json(scope) or self._error(scope) is not None:
            return None
        try:
            return self._read(scope, body)
        except ValueError:
            return None

    def _error(self, scope: Scope) -> ServiceError | None:
        """Check the request line and the headers; return the error with which to refuse them, or None."""
        if error := _host_error(scope) or self._door.error(scope):
            return error
        kind = self._unreadable
        if kind is not None and "\0" in scope["path"]:
            return kind(f"the path holds {NUL}", where="path")
        if kind is not None and b"%00" in scope["query_string"]:
            return kind(f"the query holds {NUL}", where="query")
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
        """Reply with the error, or close a WebSocket if the server cannot send an HTTP reply to it."""
        if scope["type"] == "http" or DENIAL in scope.get("extensions", {}):
            response = self._respond(error)
            if error.status == 401 and asks_for_a_page(scope):
                response = self._door.page(scope, response)
            await response(scope, receive, send)
        else:
            await WebSocketClose(POLICY_VIOLATION, error.code)(scope, receive, send)


def _host_error(scope: Scope) -> ServiceError | None:
    """Return an error unless the request has exactly one Host header, else None (RFC 9112, section 3.2).

    An HTTP/1.0 request may omit the header. Two Host headers are refused because a proxy and this service
    could each use a different one.
    """
    count = [name for name, _ in scope["headers"]].count(b"host")
    if count > 1:
        return MalformedRequest(f"there are {count} Host headers, where one is allowed", where="header Host")
    if not count and scope.get("http_version") == "1.1":
        return MalformedRequest("there is no Host header, which HTTP/1.1 needs", where="header Host")
    return None


class Leaving:
    """Calls the added functions when the connection to a client is lost.

    A function that is added after the connection was lost is called immediately.
    """

    def __init__(self) -> None:
        self._calls: set[Callable[[], None]] | None = set()

    def add(self, call: Callable[[], None]) -> None:
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
    """An ASGI receive channel that limits the size of the body and the time until the body is complete."""

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
        if self._is_whole:
            message = await self._receive()
        else:
            try:
                async with asyncio.timeout_at(self._until_s):
                    message = await self._receive()
            except TimeoutError as error:
                late = TooSlow(f"the body was not complete after {self._most_s:g} s", where="body")
                raise BodyError(late) from error
        self._complete = not message.get("more_body", False)
        self._rest_bytes -= len(message.get("body", b""))
        if self._rest_bytes < 0:
            raise BodyError(self._too_large())
        return message

    @property
    def leaving(self) -> Leaving | None:
        """The `Leaving` of the client's connection; None if the server does not provide one."""
        leaving: Leaving | None = self._scope.get("extensions", {}).get(LEAVING)
        return leaving

    @property
    def _is_whole(self) -> bool:
        return WHOLE_BODY in self._scope.get("extensions", ())


async def whole_body(receive: Receive) -> bytes:
    """Read and return the whole body of a request.

    Raises:
        ServiceError: the body exceeds a limit of the gate.
        ClientDisconnect: the client disconnected before the body was complete.
    """
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
    """Await `work` and return its result, but cancel `work` if the client disconnects first.

    `work` runs in the caller's task. If the server does not provide a `Leaving`, a second task waits for the
    disconnect message.

    Raises:
        ClientDisconnect: the client disconnected before `work` was done.
    """

    def cancel() -> None:
        scope.reschedule(0.0)  # a time in the past cancels the work

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
    """Return a receive channel that first delivers `body`, then the further messages of `receive`."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return parts.pop() if parts else await receive()

    return channel


def _says_json(scope: Scope) -> bool:
    """Whether the first Content-Type header declares JSON by the rules of FastAPI.

    As in FastAPI, spaces around the media type are ignored, including the characters U+00A0 and U+0085.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    for name, value in headers:
        if name == b"content-type":
            if value == b"application/json":
                return True
            main, _, kind = value.decode("latin-1").partition(";")[0].strip().lower().partition("/")
            return main == "application" and (kind == "json" or kind.endswith("+json"))
    return False


def asks_for_a_page(scope: Scope) -> bool:
    """Whether the request is a GET that accepts HTML, as a browser sends it for a page."""
    return scope.get("method") == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b"")


def is_cross_site(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sent the request because a page of another site triggered it.

    A link that the user follows to this service does not count. Recent browsers send the header
    Sec-Fetch-Site, older browsers send only Origin, and clients that are not browsers send neither header.
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
    """ASGI middleware that replies with status 504 if the app has not begun its reply after `at_most_s`.

    The app continues to work on the request: an env step still completes and keeps its session locked until
    then. A retry with the same Idempotency-Key waits for this work and gets its reply. Requests to the paths
    in `long` are passed on without this time limit.
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

        # A timer costs much less than a task that waits.
        timer = loop.call_later(self._at_most_s, give_up)
        try:
            await self._app(scope, receive, send_in_time)
        finally:
            timer.cancel()
