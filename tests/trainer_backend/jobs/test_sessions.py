"""The cookie of a log-in: it ends in a week, with its key, and with any change."""

from pydantic import SecretStr

from trainer_backend.jobs.sessions import COOKIE, SESSION_S, LoginSessions

KEY = SecretStr("the-key-of-these-tests")


def headers(cookie: str) -> list[tuple[bytes, bytes]]:
    return [(b"cookie", f"a=b; {COOKIE}={cookie}".encode("latin-1"))]


def test_a_session_ends_after_a_week_and_with_its_key():
    now_s = [1_000_000.0]
    sessions = LoginSessions(KEY, clock=lambda: now_s[0])
    mine = headers(sessions.cookie())
    assert sessions.match(mine)
    assert not LoginSessions(SecretStr("another"), clock=lambda: now_s[0]).match(mine)
    assert not LoginSessions(None).match(mine)
    now_s[0] += SESSION_S
    assert sessions.match(mine)
    now_s[0] += 1
    assert not sessions.match(mine)


def test_a_changed_cookie_is_none():
    sessions = LoginSessions(KEY, clock=lambda: 1_000_000.0)
    cookie = sessions.cookie()
    later = LoginSessions(KEY, clock=lambda: 1_000_001.0).cookie()
    assert later != cookie
    content, _, rest = cookie.partition(".")
    moved = ".".join([*cookie.split(".")[:2], later.split(".")[2]])  # the signature of another time
    for other in (moved, f"other.{rest}", cookie[:-1], f"{cookie}.", content, "", "..", "\xff.\xff.\xff"):
        assert not sessions.match(headers(other)), other
