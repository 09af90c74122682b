"""The gate of a service, as ASGI middleware: it checks key, origin, body and time of each request.

The gate runs before routing and before the body is read, so a client without a key cannot even find out which
paths exist. Routes need not check again that a body can be stored, logged and sent back
(shared_schemas.json_text).
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
# Key in a scope's extensions: the body has arrived, so reading needs no timeout (service_kit.connections).
WHOLE_BODY = "turnwise.whole_body"
# Key in a scope's extensions: the client's `Leaving` (service_kit.connections).
LEAVING = "turnwise.leaving"
# Key in a scope: the parsed JSON body, for its first reader.
JSON_BODY = "turnwise.json_body"
# RFC 6455: the endpoint refuses because of its own policy.
POLICY_VIOLATION = 1008
_BASIC = 'Basic realm="turnwise: any name, the key as password", charset="UTF-8"'
# Browsers send at least one of these headers with every POST and every WebSocket.
_BY_A_BROWSER = frozenset({b"origin", b"sec-fetch-site"})
# Headers that proxies and tunnels add. Behind a proxy, a Host of this machine does not prove a local client.
_FORWARDED = frozenset({b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip", b"via"})
_SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
_TooLarge = Callable[[], BodyTooLarge]


class KeyDoor:
    """A *door*, which tells the gate whether a request may enter; this one wants a key in its headers.

    A browser may send the key as the password of `Authorization: Basic`, even with requests that other sites
    trigger. Such a site cannot read the reply to a GET, but could act by a POST or a WebSocket, so a
    browser's Basic is ignored in POSTs and WebSockets. Other clients may use Basic for POSTs
    below `basic_posts`, because they can set a URL but no header. A service that has no keys and needs none
    accepts requests from this machine only, and none from a page of another site. `open_paths`, and paths
    below `open_below`, need no key.
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
        """Return the error that refuses the request; None if the door accepts it."""
        if self._is_open(scope["path"]):
            return None
        if not self._keys.configured:
            if self._keys.needed:
                return NoKeyConfigured(self._keys.variable)
            return proxy_error(scope, self._keys) or origin_error(scope, self._keys)
        credentials = self.credentials(scope)
        return None if self._keys.match(credentials) else no_key(self._keys, credentials, self._unauthorised)

    def page(self, scope: Scope, response: Response) -> Response:
        """Return the reply to a browser's page request in place of a 401."""
        response.headers["WWW-Authenticate"] = _BASIC
        return response

    def credentials(self, scope: Scope) -> RawHeaders:
        """Return the headers; if Basic may be used here, its password is added as X-API-Key."""
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
    """A door (see `KeyDoor`) that accepts the key, or the cookie of the log-in page.

    Requests of other sites' pages are refused. A service without keys accepts requests from this machine
    only, without a proxy and to its own host names: another site could let its host name resolve to
    127.0.0.1, and its pages would count as ours. `has_session` checks the headers for the cookie. Page
    requests without the cookie are redirected to the path `login`.
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
    """Return an error if a proxy forwarded the request: a service without keys cannot know its sender."""
    names = sorted(_FORWARDED.intersection(name for name, _ in scope["headers"]))
    if not names:
        return None
    return Forbidden(
        "a proxy passes this request on, and without a key only this machine may ask",
        where=f"header {names[0].decode()}",
        hint=f"Set {keys.variable}.",
    )


def origin_error(scope: Scope, keys: Keys) -> ServiceError | None:
    """Return an error if a page of another site sent the request or, without keys, Host is not local."""
    headers = dict(scope["headers"])
    host = headers.get(b"host", b"").decode("latin-1")
    name_and_port = re.fullmatch(HOST, host)
    # Anyone can make another host name resolve to this machine.
    if not keys.configured and (name_and_port is None or not is_loopback(name_and_port[1])):
        return Forbidden(
            f"Host is {host[:100]!r}, and without a key only this machine may ask, by its own names",
            where="header Host",
            hint=f"Ask http://127.0.0.1 or http://localhost, or set {keys.variable}.",
        )
    # A WebSocket has no method; like a POST, it can change something.
    if is_cross_site(scope.get("method", "POST"), headers):
        return Forbidden("the page of another site sent this request", where="header Origin")
    return None


def no_key(keys: Keys, headers: RawHeaders, kind: type[ServiceError] = Unauthorised) -> ServiceError:
    """Make the error for a request without a valid key."""
    return kind(
        "another key was given" if presented_keys(headers) else "no key was given",
        where="header X-API-Key",
        hint=f"Send the {keys.variable} as X-API-Key or Authorization: Bearer.",
    )


class Gate:
    """Wraps the app and refuses invalid requests.

    Statuses: 400 without exactly one Host header, 401 or 503 without a valid key, 403 if the door forbids the
    request, 408 for a body that is too slow, 413 for a body that is too large, 422 for a URL or JSON body
    that cannot be stored.

    `read` parses a JSON body; if it raises ValueError, the reply is the error `unreadable`. If `unreadable`
    is None, only routes read bodies. `large_body_hint` is advice to the sender of a body that is too large.
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
        """Return the value of a JSON body; None if it is null or faulty, so that the app has to answer."""
        if len(body) > self._max_body_bytes or not _says_json(scope) or self._error(scope) is not None:
            return None
        try:
            return self._read(scope, body)
        except ValueError:
            return None

    def _error(self, scope: Scope) -> ServiceError | None:
        """Return the error that refuses the request by its head alone; None if its head is valid."""
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
        """Reply with the error; close a WebSocket for which the server cannot send an HTTP reply."""
        if scope["type"] == "http" or DENIAL in scope.get("extensions", {}):
            response = self._respond(error)
            if error.status == 401 and asks_for_a_page(scope):
                response = self._door.page(scope, response)
            await response(scope, receive, send)
        else:
            await WebSocketClose(POLICY_VIOLATION, error.code)(scope, receive, send)


def _host_error(scope: Scope) -> ServiceError | None:
    """Return an error unless there is exactly one Host header; HTTP/1.0 may omit it. RFC 9112, section 3.2.

    With two Host headers, a proxy and this service might choose different ones.
    """
    count = [name for name, _ in scope["headers"]].count(b"host")
    if count > 1:
        return MalformedRequest(f"there are {count} Host headers, where one is allowed", where="header Host")
    if not count and scope.get("http_version") == "1.1":
        return MalformedRequest("there is no Host header, which HTTP/1.1 needs", where="header Host")
    return None


class Leaving:
    """Calls functions when a client's connection is lost, and at once those that are added after that."""

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
        """The client's `Leaving`; None if the server provides none."""
        leaving: Leaving | None = self._scope.get("extensions", {}).get(LEAVING)
        return leaving

    @property
    def _is_whole(self) -> bool:
        return WHOLE_BODY in self._scope.get("extensions", ())


async def whole_body(receive: Receive) -> bytes:
    """Read the whole body, within the limits of the gate's receive channel."""
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
    """Await the work. If the client disconnects first, cancel the work and raise ClientDisconnect.

    The work runs in the caller's task. Without `LEAVING`, another task waits for the disconnect message.
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
    """Make a receive channel that returns this body first, then the client's further messages."""
    parts: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def channel() -> Message:
        return parts.pop() if parts else await receive()

    return channel


def _says_json(scope: Scope) -> bool:
    """Whether FastAPI would read the body as JSON, by the first Content-Type.

    Like FastAPI, `strip` also removes U+00A0 and U+0085.
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
    """Whether a browser requests a page."""
    return scope.get("method") == "GET" and b"text/html" in dict(scope["headers"]).get(b"accept", b"")


def is_cross_site(method: str, headers: Mapping[bytes, bytes]) -> bool:
    """Whether a browser sends the request for a page of another site, other than by a followed link.

    Newer browsers send Sec-Fetch-Site, older ones only Origin, and programs neither.
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
    """Wraps the app: replies 504 if no reply has begun `at_most_s` seconds after the request.

    The work continues: its session stays locked until the step is complete, and a retry with the same
    Idempotency-Key gets its reply. The paths in `long` have other limits.
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

        # A timer is much cheaper than a task.
        timer = loop.call_later(self._at_most_s, give_up)
        try:
            await self._app(scope, receive, send_in_time)
        finally:
            timer.cancel()
