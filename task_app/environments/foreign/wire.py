"""HTTP and WebSocket clients for servers that the operator allows.

Every answer has a deadline and a size limit. Redirects are not followed and proxies are not used, because
both could lead to a host that is not allowed.
"""

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from ssl import SSLContext
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit, urlunsplit

from service_kit.replies import ReplyEncoded, ReplyTooLarge, bounded, plain_client
from shared_schemas.json_text import read_json
from shared_schemas.prefixes import PREFIXES
from shared_schemas.urls import PORTS, split_http
from task_app.environments.foreign.peer import ForeignDeadline, ForeignFailed
from task_app.errors import InvalidRequest, check_host, clipped
from task_app.settings import Reach

if TYPE_CHECKING:  # these imports take 5 % of a start, and only environments of servers need them
    import httpx
    from websockets.sync.client import ClientConnection

# Time limit for closing a connection.
CLOSE_S = 1.0


def checked_url(url: str, reach: Reach) -> SplitResult:
    """Check the URL of an env_name, and return its parts.

    Raises:
        InvalidRequest: the URL is not an http or https URL, or it contains a user name or a password.
        HostNotAllowed: the URL's host is not on the operator's list.
    """
    parts = split_http(url)
    if parts is None or "@" in parts.netloc:
        raise InvalidRequest(
            f"{clipped(url)!r} is no http or https URL with a host and without a password",
            where="env_name",
            hint="for example openenv:http://127.0.0.1:8000",
        )
    check_host(
        "environment", parts, reach.allowed_environment_hosts, where="env_name", hint=PREFIXES["openenv"].how
    )
    return parts


def below(parts: SplitResult, path: str, *, websocket: bool = False) -> str:
    """Append `path` to a base URL. The base's query is kept, because it may contain keys for routing."""
    scheme = parts.scheme.replace("http", "ws") if websocket else parts.scheme
    return urlunsplit((scheme, parts.netloc, parts.path.rstrip("/") + path, parts.query, ""))


@cache
def _certificates() -> SSLContext:
    """Return the trusted certificates. They are read only once, because that takes 20 ms."""
    import httpx

    return httpx.create_ssl_context(trust_env=False)


class Http:
    """Sends requests to one server. `client` keeps the connection open; its headers are sent each time."""

    def __init__(self, name: str, reach: Reach) -> None:
        self._name = name
        self._reach = reach
        self.client = plain_client(trust_env=False, verify=_certificates())

    def close(self) -> None:
        self.client.close()

    def send(
        self,
        method: str,
        url: str,
        *,
        body: Any = None,
        deadline_s: float | None = None,
        ends: Callable[[bytes], bool] = lambda content: False,
    ) -> "tuple[httpx.Response, bytes]":
        """Send a request; return the response and its content.

        Args:
            deadline_s: by default the operator's setting.
            ends: called with the content so far; reading stops when it returns true.

        Raises:
            ForeignFailed: the status is 300 or more, the content is too long, or the request fails.
            ForeignDeadline: the deadline passes.
        """
        import httpx

        deadline_s = deadline_s or self._reach.environment_deadline_s
        until_s = time.monotonic() + deadline_s
        content = bytearray()
        try:
            with self.client.stream(method, url, json=body, timeout=deadline_s) as response:
                for chunk in bounded(response.iter_raw(), self._reach.max_environment_bytes):
                    content += chunk
                    if time.monotonic() > until_s:
                        raise late(self._name, deadline_s)
                    if ends(bytes(content)):
                        break
        except ReplyTooLarge as exc:
            raise too_much(self._name, self._reach) from exc
        except ReplyEncoded as exc:
            raise ForeignFailed(
                f"{self._name}: {exc}", unquoted=f"{self._name}: its reply is encoded"
            ) from exc
        except httpx.TimeoutException as exc:
            raise late(self._name, deadline_s) from exc
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            what = f"{self._name}: {type(exc).__name__}"
            raise ForeignFailed(f"{what}: {clipped(str(exc), 200)}", unquoted=what) from exc
        if response.status_code >= 300:
            text = clipped(bytes(content).decode("utf-8", "replace"), 200)
            what = f"{self._name} answered {response.status_code} to {method}"
            raise ForeignFailed(f"{what} {url}: {text}", unquoted=what)
        return response, bytes(content)


class Socket:
    """A WebSocket over which JSON objects are sent; the server answers each object with one message."""

    def __init__(self, name: str, url: str, reach: Reach) -> None:
        self._name = name
        self._reach = reach
        self._stack = ExitStack()
        with self._failures():
            self._connection = self._connect(url)

    def ask(self, message: Mapping[str, Any]) -> Any:
        from websockets.exceptions import ConnectionClosed

        with self._failures():
            # A server without free capacity sends an error and closes; `recv` can still read this error.
            with suppress(ConnectionClosed):
                self._connection.send(json.dumps(message))
            answer = self._connection.recv(timeout=self._reach.environment_deadline_s)
        return parse_json(answer, self._name)

    def close(self) -> None:
        self._stack.close()

    def _connect(self, url: str) -> "ClientConnection":
        from websockets.sync.client import connect

        parts = urlsplit(url)
        port = parts.port or PORTS[parts.scheme.replace("ws", "http")]
        # websockets follows no redirect if it is given a connected socket.
        plain = socket.create_connection((parts.hostname, port), timeout=self._reach.environment_deadline_s)
        try:
            opening = connect(
                url, sock=plain, proxy=None, compression=None, max_size=self._reach.max_environment_bytes,
                open_timeout=self._reach.environment_deadline_s, close_timeout=CLOSE_S,
            )  # fmt: skip
            return self._stack.enter_context(opening)
        except BaseException:
            plain.close()
            raise

    @contextmanager
    def _failures(self) -> Iterator[None]:
        from websockets import CloseCode
        from websockets.exceptions import ConnectionClosed, WebSocketException

        try:
            yield
        except TimeoutError as exc:
            raise late(self._name, self._reach.environment_deadline_s) from exc
        except ConnectionClosed as exc:
            if exc.sent is not None and exc.sent.code == CloseCode.MESSAGE_TOO_BIG:
                raise too_much(self._name, self._reach) from exc
            raise ForeignFailed(
                f"{self._name} closed its socket in mid-episode: {clipped(str(exc), 200)}"
            ) from exc
        except (OSError, WebSocketException) as exc:
            raise ForeignFailed(f"{self._name}: {type(exc).__name__}: {clipped(str(exc), 200)}") from exc


def parse_json(text: bytes | str, name: str) -> Any:
    """Parse a JSON text. Raises ForeignFailed, which begins with `name`, if the text is not valid JSON."""
    try:
        return read_json(text)
    except ValueError as exc:
        what = f"{name} answered no JSON"
        raise ForeignFailed(f"{what}: {clipped(str(exc), 200)}", unquoted=what) from exc


def too_much(name: str, reach: Reach) -> ForeignFailed:
    return ForeignFailed(
        f"{name} answered more than {reach.max_environment_bytes} bytes (TURNWISE_MAX_ENVIRONMENT_BYTES)"
    )


def late(name: str, deadline_s: float) -> ForeignDeadline:
    return ForeignDeadline(f"{name} did not answer within {deadline_s:g} s (TURNWISE_ENVIRONMENT_DEADLINE_S)")
