"""The session cookie of the log-in page. It contains its time of issue, signed with the service's key."""

import hashlib
import time
from collections.abc import Callable

from itsdangerous import BadSignature, TimestampSigner
from pydantic import SecretStr
from starlette.requests import cookie_parser

from service_kit.keys import RawHeaders

COOKIE = "turnwise_session"
SESSION_S = 7 * 24 * 3600
_CONTENT = b"session"


class LoginSessions:
    """Creates and checks session cookies, which become invalid when the key changes.

    `clock` returns seconds since 1970.
    """

    def __init__(self, key: SecretStr | None, *, clock: Callable[[], float] = time.time) -> None:
        self._signer = None if key is None else _Signer(key.get_secret_value(), clock)

    def cookie(self) -> str:
        """Return the cookie of a new session."""
        assert self._signer is not None, "without a key there is no log-in"
        return self._signer.sign(_CONTENT).decode()

    def match(self, headers: RawHeaders) -> bool:
        """Return whether the headers contain a valid session cookie of this key."""
        cookies = cookie_parser(
            "; ".join(value.decode("latin-1") for name, value in headers if name == b"cookie")
        )
        try:
            return self._signer is not None and bool(
                self._signer.unsign(cookies.get(COOKIE, ""), max_age=SESSION_S)
            )
        except BadSignature:  # no cookie, or a changed or expired one, or one of another key
            return False


class _Signer(TimestampSigner):
    def __init__(self, key: str, clock: Callable[[], float]) -> None:
        super().__init__(key, salt="turnwise session", key_derivation="hmac", digest_method=hashlib.sha256)
        self._clock = clock

    def get_timestamp(self) -> int:
        return int(self._clock())
