"""API keys: which a request presents, and whether one of them is ours. Compared in constant time."""

import base64
import binascii
import hashlib
import hmac
from collections.abc import Iterable

from starlette.types import Scope

from task_app.settings import Settings

RawHeaders = Iterable[tuple[bytes, bytes]]

# Browsers send one of them, at least, with every POST and every socket.
_BY_A_BROWSER = frozenset({b"origin", b"sec-fetch-site"})
_ADDRESSES = "/openenv/"


class Keys:
    """The configured keys, as digests: equal length for every comparison, and nothing that could be shown."""

    def __init__(self, settings: Settings) -> None:
        self._digests = tuple(_digest(key.get_secret_value().encode()) for key in settings.api_keys)
        self._opened = tuple(f"/{name}" for name in settings.open_routes)

    @property
    def configured(self) -> bool:
        return bool(self._digests)

    def opened(self, path: str) -> bool:
        """The operator lets everybody in there (`TURNWISE_OPEN_ROUTES`)."""
        return bool(self._opened) and any(
            path == prefix or path.startswith(prefix + "/") for prefix in self._opened
        )

    def match(self, headers: RawHeaders) -> bool:
        """Any presented key is any configured one. Every pair is compared, so time tells nothing."""
        found = [_digest(key) for key in presented_keys(headers)]
        return any([hmac.compare_digest(one, digest) for one in found for digest in self._digests])


def presented_keys(headers: RawHeaders) -> list[bytes]:
    """From X-API-Key, X-API-Keys (comma separated) and Authorization: Bearer; names are lower-case."""
    found: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"x-api-keys":
            found.extend(part.strip() for part in value.split(b","))
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return [key for key in found if key]


def credentials(scope: Scope) -> RawHeaders:
    """The headers, with the password of `Authorization: Basic` as a key where a browser may use one.

    A browser adds it to requests that other sites make it send. Those can read nothing from a GET, but they
    could act by a POST and talk over a socket: there Basic counts for nothing, unless no browser sent it. Of
    POSTs that goes for OpenEnv's alone: its clients know an address, and send what it holds as Basic.
    """
    headers: list[tuple[bytes, bytes]] = scope["headers"]
    names = dict(headers)
    acts = scope["type"] == "websocket" or scope["method"] not in ("GET", "HEAD")
    if acts and not names.keys().isdisjoint(_BY_A_BROWSER):
        return headers
    if acts and scope["type"] == "http" and not scope["path"].startswith(_ADDRESSES):
        return headers
    return [*headers, *((b"x-api-key", key) for key in _basic_passwords(names.get(b"authorization", b"")))]


def asks_for_a_page(scope: Scope) -> bool:
    """A person's browser: told to, it asks for a name and a password, and the key is the password."""
    accept = dict(scope["headers"]).get(b"accept", b"")
    return scope.get("method") == "GET" and b"text/html" in accept


def _basic_passwords(value: bytes) -> list[bytes]:
    """The password, or the user name where the password is empty (`curl -u KEY:`)."""
    if value[:6].lower() != b"basic ":
        return []
    try:
        user, _, password = base64.b64decode(value[6:].strip(), validate=True).partition(b":")
    except binascii.Error:
        return []
    return [password or user]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
