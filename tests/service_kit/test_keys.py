"""Keys and guesses, apart from any service. Nothing here tells a part of a key."""

from pydantic import SecretStr

from service_kit.keys import Guesses, Keys

KEY = "the-key-of-these-tests"


def test_a_key_is_right_in_any_header_that_may_hold_one():
    keys = Keys([SecretStr(KEY), SecretStr("another")], variable="KEY")
    right = [
        [(b"x-api-key", KEY.encode())],
        [(b"x-api-keys", b"no, another ,")],
        [(b"authorization", b"bearer  " + KEY.encode())],
        [(b"x-api-key", b"no"), (b"authorization", b"Bearer another")],
    ]
    wrong = [
        [],
        [(b"x-api-key", b"")],
        [(b"authorization", KEY.encode())],
        [(b"x-api-key", KEY[:-1].encode())],
    ]
    assert [keys.match(headers) for headers in (*right, *wrong)] == [True] * 4 + [False] * 4
    assert not Keys([], variable="KEY").match([(b"x-api-key", b"")])
    assert keys.opens(f" {KEY} ") and not keys.opens("")


def test_wrong_keys_are_forgotten_after_a_minute_and_counted_by_address():
    now_s = [0.0]
    guesses = Guesses(lambda: now_s[0])
    for second in range(10):
        assert guesses.wait_s("a") == 0.0
        now_s[0] = float(second)
        guesses.count("a")
    assert (guesses.wait_s("a"), guesses.wait_s("b")) == (51.0, 0.0)  # the first came at 0, now it is 9
    now_s[0] = 60.0
    assert guesses.wait_s("a") == 0.0
