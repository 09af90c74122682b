"""Every wrong form of a right reply: a generator over its fields and the types of JSON, and what may come of
each."""

import json
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from service_kit.errors import ServiceError
from service_kit.server import Listener, ServerThread

MISSING, TWICE = object(), object()
# By the name of the kind. A list also loses and repeats its last element, and a member is left out, or there
# twice.
VALUES: dict[str, Any] = {
    "null": None,
    "true": True,
    "minus one": -1,
    "a fraction": 0.5,
    "10**30": 10**30,
    "NaN": float("nan"),
    "an empty text": "",
    "a number as text": "7",
    "a long text": "x" * 20_000,
    "an empty list": [],
    "a nested list": [[[]]],
    "an empty object": {},
}
# Whole replies that are none, whatever the right one is.
BROKEN: dict[str, bytes] = {
    "no JSON": b"<html>what?</html>",
    "half of a JSON text": b'{"choices": [{"token_ids": [1,',
    "two JSON texts": b"{}{}",
    "invalid UTF-8": b'{"version": "\xff\xfe"}',
    "100,000 levels": b"[" * 100_000 + b"]" * 100_000,
    "100,000 open levels": b'{"a":' * 100_000,
    "a number of 5,000 digits": b'{"version": ' + b"9" * 5_000 + b"}",
    "a number beyond a float": b"1e999",
}
# A sentence with clipped values, and a hint.
_LONGEST_MESSAGE = 3_000


class Again(str):
    """A key that an object holds although it has it already."""

    __slots__ = ()
    __eq__, __hash__ = object.__eq__, object.__hash__


@dataclass(frozen=True)
class Wrong:
    """One wrong reply: the field at `path` is `new` instead of `old`."""

    path: str
    kind: str
    old: Any
    new: Any
    body: bytes

    @property
    def names(self) -> list[str]:
        """The names of the path, from the last one; indexes are left out."""
        if self.new is TWICE:
            return [self.path.rpartition(".")[2]]
        return [name for name in reversed(self.path.split(".")) if not name.isdecimal()]

    def __str__(self) -> str:
        return f"{self.path or 'the whole'}: {self.kind}"


def wrong_replies(right: Any) -> Iterator[Wrong]:
    """Yield each field of a JSON value with each wrong value in its place, that of the whole included."""
    for path, kind, old, new, whole in _changes(right, ""):
        yield Wrong(path, kind, old, new, json.dumps(whole).encode())
    for kind, body in BROKEN.items():
        yield Wrong("", kind, right, MISSING, body)


def _changes(right: Any, path: str) -> Iterator[tuple[str, str, Any, Any, Any]]:
    for kind, value in VALUES.items():
        if type(value) is not type(right) or value != right:
            yield path, kind, right, value, value
    if isinstance(right, list) and right:
        for kind, value in (("one shorter", right[:-1]), ("one longer", [*right, right[-1]])):
            yield path, kind, right, value, value
        for *change, value in _changes(right[-1], f"{path}.{len(right) - 1}".lstrip(".")):
            yield *change, [*right[:-1], value]  # type: ignore[misc]
    if isinstance(right, dict):
        for key, part in right.items():
            place, others = (
                f"{path}.{key}".lstrip("."),
                {name: one for name, one in right.items() if name != key},
            )
            yield place, "missing", part, MISSING, others
            yield place, "twice", part, TWICE, {**right, Again(key): part}
            for *change, value in _changes(part, place):
                yield *change, {**right, key: value}  # type: ignore[misc]


@contextmanager
def served(replies: Mapping[str, bytes], *, status: int = 200) -> Iterator[str]:
    """The URL of a server that answers a path, or a method of JSON-RPC, with what this holds then; all
    others with what it holds for "", or {}."""

    async def answer(request: Request) -> Response:
        path = request.url.path
        if path == "/mcp" and request.method == "POST":
            path = (await request.json())["method"]
        body = replies.get(path, replies.get("", b"{}"))
        return Response(body, status_code=status, media_type="application/json")

    routes = [
        Route("/mcp", answer, methods=["POST"]),
        Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"]),
    ]
    with ServerThread(Starlette(routes=routes), Listener("127.0.0.1", 0)) as url:
        yield url


@dataclass(frozen=True)
class Reading:
    """A reply that a client reads.

    Attributes:
        part: what the client's errors name: a route, or a server.
        optional: names of fields that may be missing, null, empty, shorter or longer.
        data: beginnings of paths below which everything is data, as of a model.
    """

    part: str
    right: Any
    optional: frozenset[str] = frozenset()
    data: tuple[str, ...] = ()

    async def find_faults(
        self, serve: Callable[[bytes], None], ask: Callable[[], Awaitable[Any]]
    ) -> list[str]:
        """Serve each wrong reply, ask for it, and return a line for each that has neither an error of ours
        that names part and field, nor the value that it should have."""
        serve(json.dumps(self.right).encode())
        right = repr(await ask())
        faults = []
        for wrong in wrong_replies(self.right):
            serve(wrong.body)
            try:
                value = await ask()
            except ServiceError as error:
                fault = self._fault_of_error(wrong, str(error))
            except Exception as error:
                fault = f"escapes as {type(error).__name__}: {error}"
            else:
                is_right = wrong.new is not TWICE and (repr(value) == right or self._may_be_taken(wrong))
                fault = "" if is_right else "is taken"
            faults += [f"{wrong} {fault[:300]}"] if fault else []
        return faults

    def _fault_of_error(self, wrong: Wrong, told: str) -> str:
        if len(told) > _LONGEST_MESSAGE:
            return f"is told with {len(told)} characters"
        if self.part not in told or not any(name in told for name in wrong.names or [""]):
            return f"is told without its part or field: {told}"
        return ""

    def _may_be_taken(self, wrong: Wrong) -> bool:
        if any(f"{wrong.path}.".startswith(f"{prefix}.") for prefix in self.data):
            return True
        if wrong.new == {} and isinstance(wrong.old, dict) and wrong.old.keys() <= self.optional:
            return True
        if wrong.new is MISSING or wrong.new in (None, [], {}) or isinstance(wrong.old, list):
            return self.optional.issuperset(wrong.names[:1]) and wrong.names != []
        if isinstance(wrong.old, float):
            return type(wrong.new) in (int, float) and wrong.new - wrong.new == 0
        return type(wrong.old) is type(wrong.new) and type(wrong.old) in (str, bool)
