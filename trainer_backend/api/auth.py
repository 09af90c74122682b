"""Who asks: a key in a header, or the cookie that the log-in page gives for it. Compared in constant time."""

import hashlib
import hmac
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from http.cookies import CookieError, SimpleCookie

from pydantic import SecretStr

RawHeaders = Iterable[tuple[bytes, bytes]]
COOKIE = "turnwise_session"
SESSION_S = 7 * 24 * 3600
# Wrong keys of one address at the log-in page.
MOST_GUESSES, GUESSES_S = 10, 60.0
_MOST_ADDRESSES = 10_000
_PURPOSE = b"turnwise session "


class Keys:
    """The service's key, as digests alone; without one, everybody who gets here may ask.

    Args:
        clock: seconds of the calendar, for the cookie's end.
    """

    def __init__(self, key: SecretStr | None, *, clock: Callable[[], float] = time.time) -> None:
        secret = key.get_secret_value().encode() if key is not None else b""
        self.configured = bool(secret)
        self._digest = hashlib.sha256(secret).digest()
        self._signing = hashlib.sha256(_PURPOSE + secret).digest()
        self._clock = clock

    def opens(self, key: str) -> bool:
        """Whether that is the key."""
        return self.configured and self._equal(key.strip().encode())

    def in_headers(self, headers: RawHeaders) -> bool:
        """X-API-Key or Authorization: Bearer holds it. No page of another site can send those unasked."""
        return self.configured and any([self._equal(key) for key in presented_keys(headers)])

    def cookie(self) -> str:
        """A session from now on: its end, and a signature that only the key's owner can make."""
        ends = str(int(self._clock()) + SESSION_S)
        return f"{ends}.{self._signature(ends)}"

    def in_cookie(self, headers: RawHeaders) -> bool:
        """A session of ours that has not ended; another key ends them all."""
        if not self.configured:
            return False
        ends, _, signature = _cookie_of(headers).partition(".")
        genuine = hmac.compare_digest(signature.encode(), self._signature(ends).encode())
        return genuine and ends.isdecimal() and int(ends) > self._clock()

    def _equal(self, key: bytes) -> bool:
        return hmac.compare_digest(hashlib.sha256(key).digest(), self._digest)

    def _signature(self, ends: str) -> str:
        return hmac.new(self._signing, ends.encode(), hashlib.sha256).hexdigest()


class Guesses:
    """Wrong keys of the log-in page by the address that they come from: a few a minute, and no more.

    Args:
        clock: seconds of any beginning.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._wrong: OrderedDict[str, list[float]] = OrderedDict()

    def wait_s(self, address: str) -> float:
        """How long this address has to wait before its next one; 0: it may guess."""
        now_s = self._clock()
        times = [one for one in self._wrong.get(address, []) if now_s - one < GUESSES_S]
        return GUESSES_S - (now_s - times[0]) if len(times) >= MOST_GUESSES else 0.0

    def count(self, address: str) -> None:
        """One was wrong."""
        times = self._wrong.setdefault(address, [])
        times.append(self._clock())
        del times[:-MOST_GUESSES]
        self._wrong.move_to_end(address)
        while len(self._wrong) > _MOST_ADDRESSES:
            self._wrong.popitem(last=False)


def presented_keys(headers: RawHeaders) -> list[bytes]:
    """From X-API-Key and Authorization: Bearer; names are lower-case."""
    found = []
    for name, value in headers:
        if name == b"x-api-key":
            found.append(value.strip())
        elif name == b"authorization" and value[:7].lower() == b"bearer ":
            found.append(value[7:].strip())
    return [key for key in found if key]


def _cookie_of(headers: RawHeaders) -> str:
    for name, value in headers:
        if name == b"cookie":
            try:
                found = SimpleCookie(value.decode("latin-1")).get(COOKIE)
            except CookieError:
                continue
            if found is not None:
                return found.value
    return ""
