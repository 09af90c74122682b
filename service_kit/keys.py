"""API keys: reading a service's own keys, and checking the keys of a request.

Keys are compared in constant time. No message contains a part of a key.
"""

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from cachetools import LRUCache
from pydantic import SecretStr

from service_kit.errors import SettingsError
from shared_schemas.plain_text import read_text

RawHeaders = Iterable[tuple[bytes, bytes]]

# Environment variables with the key of a task app, and of a trainer service.
TASK_APP_KEY, TRAINER_KEY = "ENVIRONMENT_API_KEY", "TRAINER_API_KEY"
# Within GUESSES_S, MOST_GUESSES wrong keys of an address get status 401 on the log-in page, further ones 429.
MOST_GUESSES, GUESSES_S = 10, 60.0
_MOST_ADDRESSES = 10_000
_LONGEST_KEY = 500


def key_from_environ(environ: Mapping[str, str], variable: str) -> SecretStr | None:
    """Return the key in the variable, or in the file that `<variable>_FILE` names; None if neither is set."""
    value = environ.get(variable, "").strip()
    file_variable = f"{variable}_FILE"  # the convention of containers
    name = environ.get(file_variable, "")
    if not value and name:
        try:
            value = read_text(Path(name)).strip()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{file_variable} names {name!r}, which cannot be read: {error}") from error
        if not value:  # an empty key would open the service to everyone, or to no one
            raise SettingsError(f"{file_variable} names {name!r}, which is empty")
    if not value:
        return None
    if not (value.isascii() and value.isprintable() and len(value) <= _LONGEST_KEY):
        raise SettingsError(
            f"{variable} holds no key: a key is at most {_LONGEST_KEY} printable ASCII characters"
        )
    return SecretStr(value)


class Keys:
    """The valid keys of a service, stored as digests of equal length.

    `variable` is the environment variable that messages name. A service without keys refuses every request if
    keys are `needed`; otherwise it answers this machine only.
    """

    def __init__(self, keys: Iterable[SecretStr], *, variable: str, needed: bool = True) -> None:
        self._digests = tuple(_digest(key.get_secret_value().encode()) for key in keys)
        self.variable, self.needed = variable, needed

    @property
    def configured(self) -> bool:
        return bool(self._digests)

    def match(self, headers: RawHeaders) -> bool:
        """Whether the headers hold a valid key."""
        return self._any_right(presented_keys(headers))

    def opens(self, key: str) -> bool:
        """Whether this key is valid."""
        return self._any_right([key.strip().encode()])

    def _any_right(self, keys: Iterable[bytes]) -> bool:
        digests = [_digest(key) for key in keys]
        # A list, not a generator: all pairs are compared, so that the time reveals nothing.
        return any([hmac.compare_digest(one, ours) for one in digests for ours in self._digests])


class Guesses:
    """Counts wrong keys at the log-in page by address. A valid key is always accepted."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: LRUCache[str, list[float]] = LRUCache(_MOST_ADDRESSES)

    def wait_s(self, address: str) -> float:
        """Return the seconds until this address may guess again; 0 if it may now."""
        now_s = self._clock()
        times_s = [time_s for time_s in self._wrong.get(address, []) if now_s - time_s < GUESSES_S]
        return GUESSES_S - (now_s - times_s[0]) if len(times_s) >= MOST_GUESSES else 0.0

    def count(self, address: str) -> None:
        """Count one wrong key."""
        self._wrong[address] = [*self._wrong.get(address, []), self._clock()][-MOST_GUESSES:]


def presented_keys(headers: RawHeaders) -> list[bytes]:
    """Return the keys in X-API-Key, X-API-Keys (comma separated) and Authorization: Bearer."""
    keys: list[bytes] = []
    for name, value in headers:
        if name == b"x-api-key":
            keys.append(value.strip())
        elif name == b"x-api-keys":
            keys.extend(part.strip() for part in value.split(b","))
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            keys.append(value[7:].strip())
    return [key for key in keys if key]


def basic_passwords(headers: RawHeaders) -> list[bytes]:
    """Return the password of Authorization: Basic, or the user name if it is empty (`curl -u KEY:`)."""
    value = dict(headers).get(b"authorization", b"")
    if value[:6].lower() != b"basic ":
        return []
    try:
        user, _, password = base64.b64decode(value[6:].strip(), validate=True).partition(b":")
    except binascii.Error:
        return []
    return [password or user]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
