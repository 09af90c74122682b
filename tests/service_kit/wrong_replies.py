"""Every wrong form of a right reply: a generator over its fields and the types of JSON."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Stands for a number that JSON has no word for, and Python's writer writes.
NAN, INFINITE = float("nan"), float("inf")
LONG = "x" * 1_000_000
# By the name of the kind. A list also loses and repeats its last element, and a member is left out.
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 0.5,
    "10**30": 10**30,
    "NaN": NAN,
    "infinity": INFINITE,
    "an empty text": "",
    "a text": "x",
    "a number as text": "7",
    "a megabyte": LONG,
    "an empty list": [],
    "a nested list": [[[]]],
    "an empty object": {},
}


@dataclass(frozen=True)
class Wrong:
    """One wrong reply.

    Attributes:
        path: of the field, as in `choices.0.token_ids`; "" for the whole.
        kind: what is wrong with it.
    """

    path: str
    kind: str
    body: bytes

    @property
    def field(self) -> str:
        """The last name of the path that is no index."""
        return next((name for name in reversed(self.path.split(".")) if not name.isdecimal()), "")

    def __str__(self) -> str:
        return f"{self.path or 'the whole'}: {self.kind}"


def wrong_replies(right: Any) -> Iterator[Wrong]:
    """Yield each field of a JSON value with each wrong value in its place, that of the whole included."""
    for path, kind, value in _changes(right, ""):
        yield Wrong(path, kind, json.dumps(value).encode())


def _changes(right: Any, path: str) -> Iterator[tuple[str, str, Any]]:
    for kind, value in VALUES.items():
        if type(value) is not type(right) or value != right:
            yield path, kind, value
    if isinstance(right, list) and right:
        yield path, "one shorter", right[:-1]
        yield path, "one longer", [*right, right[-1]]
        # The elements of a list are alike: the first and the last one stand for all.
        for index in sorted({0, len(right) - 1}):
            for name, kind, value in _changes(right[index], _join(path, index)):
                yield name, kind, [*right[:index], value, *right[index + 1 :]]
    if isinstance(right, dict):
        for key, part in right.items():
            yield _join(path, key), "missing", {name: one for name, one in right.items() if name != key}
            for name, kind, value in _changes(part, _join(path, key)):
                yield name, kind, {**right, key: value}


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


# Whole replies that are none, whatever the right one is.
BROKEN: dict[str, bytes] = {
    "empty": b"",
    "no JSON": b"<html>what?</html>",
    "half of a JSON text": b'{"choices": [{"token_ids": [1,',
    "two JSON texts": b"{}{}",
    "invalid UTF-8": b'{"version": "\xff\xfe"}',
    "half a character": b'{"version": "\\ud83d"}',
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "100,000 open levels": b'{"a":' * 100_000,
    "a number of 5,000 digits": b'{"version": ' + b"9" * 5_000 + b"}",
    "a number beyond a float": b"1e999",
}
