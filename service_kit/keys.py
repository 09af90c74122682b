"""Reads the API keys of a service from its environment, and checks the keys in requests.

The time of a comparison does not depend on the keys. No error message contains any part of a key.
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

# The environment variables that contain the API key of a task app and of a trainer service.
TASK_APP_KEY, TRAINER_KEY = "ENVIRONMENT_API_KEY", "TRAINER_API_KEY"
# The log-in page replies with 401 to the first MOST_GUESSES wrong keys that an address sends within
# GUESSES_S, and with 429 to further wrong keys.
MOST_GUESSES, GUESSES_S = 10, 60.0
_MOST_ADDRESSES = 10_000
_LONGEST_KEY = 500


def key_from_environ(environ: Mapping[str, str], variable: str) -> SecretStr | None:
    """Return the API key in an environment variable, or in the file that `<variable>_FILE` names.

    Return None if neither variable is set.

    Raises:
        SettingsError: the file cannot be read or is empty, or the text cannot be a key.
    """
    value = environ.get(variable, "").strip()
    file_variable = f"{variable}_FILE"  # follows a convention of container images
    name = environ.get(file_variable, "")
    if not value and name:
        try:
            value = read_text(Path(name)).strip()
        except (OSError, ValueError) as error:
            raise SettingsError(f"{file_variable} names {name!r}, which cannot be read: {error}") from error
        if not value:  # an empty file is a mistake; without a key, the service might accept everyone
            raise SettingsError(f"{file_variable} names {name!r}, which is empty")
    if not value:
        return None
    if not (value.isascii() and value.isprintable() and len(value) <= _LONGEST_KEY):
        raise SettingsError(
            f"{variable} holds no key: a key is at most {_LONGEST_KEY} printable ASCII characters"
        )
    return SecretStr(value)


class Keys:
    """The valid API keys of a service, stored as digests of equal length.

    Args:
        keys: the valid keys; may be empty.
        variable: environment variable of the key, which error messages name.
        needed: if True, a service without keys refuses every request; if False, it answers only requests
            from this machine.
    """

    def __init__(self, keys: Iterable[SecretStr], *, variable: str, needed: bool = True) -> None:
        self._digests = tuple(_digest(key.get_secret_value().encode()) for key in keys)
        self.variable, self.needed = variable, needed

    @property
    def configured(self) -> bool:
        return bool(self._digests)

    def match(self, headers: RawHeaders) -> bool:
        """Whether the headers of a request contain a valid key."""
        return self._any_right(presented_keys(headers))

    def opens(self, key: str) -> bool:
        """Whether `key` is a valid key."""
        return self._any_right([key.strip().encode()])

    def _any_right(self, keys: Iterable[bytes]) -> bool:
        digests = [_digest(key) for key in keys]
        # `any` gets a list, not a generator, so that all pairs are compared and the time reveals nothing.
        return any([hmac.compare_digest(one, ours) for one in digests for ours in self._digests])


class Guesses:
    """Limits the rate at which each client address may try keys at the log-in page.

    A valid key is accepted even from an address that has sent too many wrong keys.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: LRUCache[str, list[float]] = LRUCache(_MOST_ADDRESSES)

    def wait_s(self, address: str) -> float:
        """Return the seconds until this address may try another key; 0 if it may try now."""
        now_s = self._clock()
        times_s = [time_s for time_s in self._wrong.get(address, []) if now_s - time_s < GUESSES_S]
        return GUESSES_S - (now_s - times_s[0]) if len(times_s) >= MOST_GUESSES else 0.0

    def count(self, address: str) -> None:
        """Record that this address sent a wrong key now."""
        self._wrong[address] = [*self._wrong.get(address, []), self._clock()][-MOST_GUESSES:]


def presented_keys(headers: RawHeaders) -> list[bytes]:
    """Return the keys in the headers X-API-Key, X-API-Keys (comma-separated) and Authorization: Bearer."""
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
    """Return the password in the header Authorization: Basic, as a list with at most one item.

    If the password is empty, return the user name instead, because `curl -u KEY:` sends the key as user name.
    """
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
