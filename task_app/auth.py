"""API keys: which a request presents, and whether one of them is ours. Compared in constant time."""

import hashlib
import hmac
from collections.abc import Iterable

from task_app.settings import Settings

RawHeaders = Iterable[tuple[bytes, bytes]]


class Keys:
    """The configured keys, as digests: equal length for every comparison, and nothing that could be shown."""

    def __init__(self, settings: Settings) -> None:
        self._digests = tuple(_digest(key.get_secret_value().encode()) for key in settings.api_keys)

    @property
    def configured(self) -> bool:
        return bool(self._digests)

    def match(self, headers: RawHeaders) -> bool:
        """Any presented key is any configured one. Every pair is compared, so time tells nothing."""
        pairs = [(_digest(key), digest) for key in presented_keys(headers) for digest in self._digests]
        return any([hmac.compare_digest(found, digest) for found, digest in pairs])


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


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
