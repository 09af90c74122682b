"""Calls from one process to another, by a hand-made table: over a socket, over HTTP, against strangers."""

import asyncio
import math
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import SecretStr

from service_kit.errors import BodyTooLarge, ServiceError
from service_kit.keys import Keys
from service_kit.rpc import Call, ErrorBody, Reply, Table, calls_app, reply_lines
from service_kit.server import Listener, ServerThread
from service_kit.socket_calls import Caller, Unanswered, serve_calls
from tests.processes import until


class KitError(ServiceError, code="kit_error"):
    """The base of the tree."""


class Failure(KitError, code="kit_failure"):
    """What fits nothing."""


class Spoilt(KitError, code="kit_spoilt"):
    """An error with counts of its own."""

    carries = {"parts": tuple[int, ...]}  # noqa: RUF012

    def __init__(self, *, parts: tuple[int, ...]) -> None:
        super().__init__(f"{len(parts)} parts", where="part 1", hint="Look.")
        self.parts = parts


@dataclass(frozen=True)
class Loaf:
    slices: int
    weights: list[float]


MOST = 10_000
TABLE = Table(
    {
        "bake": Call(tuple[Loaf, float], Loaf, most_argument_bytes=MOST, most_reply_bytes=MOST),
        "count": Call(tuple[int], str, progress=tuple[int, int], most_reply_bytes=MOST, reply_growth=2),
        "wait": Call(tuple[()], None, progress=tuple[()]),
        "spoil": Call(tuple[()], None),
        "lie": Call(tuple[()], Loaf),
        "rise": Call(tuple[()], Loaf, progress=tuple[Loaf]),
    },
    errors=KitError,
    failure=Failure,
)
LOAF = Loaf(slices=3, weights=[0.1, -0.0, math.inf])


class Kitchen:
    def __init__(self) -> None:
        self.waiting, self.stopped = asyncio.Event(), asyncio.Event()

    async def bake(self, loaf: Loaf, factor: float) -> Loaf:
        return replace(loaf, weights=[factor, *loaf.weights])

    async def count(self, most: int, tell: Callable[..., None]) -> str:
        for number in range(most):
            tell(number, most)
        return "counted"

    async def wait(self, tell: Callable[..., None]) -> None:
        self.waiting.set()
        tell()
        try:
            await asyncio.Event().wait()
        finally:
            self.stopped.set()

    async def spoil(self) -> None:
        raise Spoilt(parts=(1, 2))

    async def lie(self) -> Any:
        return {"slices": "many", "weights": []}


Ask = Callable[..., Awaitable[Any]]


@asynccontextmanager
async def by_socket(kitchen: Kitchen) -> AsyncIterator[Ask]:
    ours, theirs = socket.socketpair()
    serving, caller = asyncio.ensure_future(serve_calls(TABLE, kitchen, theirs)), Caller(TABLE)
    await caller.connect(ours)
    try:
        yield caller.call
    finally:
        caller.close()
        assert await serving == "its caller has ended"
        with pytest.raises(Unanswered, match="it was stopped"):
            await caller.call("spoil")


@contextmanager
def kitchen_app(kitchen: Kitchen) -> Iterator[httpx.AsyncClient]:
    def begin(request: Any, name: str, body: bytes) -> AsyncIterator[bytes]:
        return reply_lines(TABLE, kitchen, name, body)

    app = calls_app(TABLE, begin, Keys([SecretStr("key")], variable="KEY"))
    with ServerThread(app, Listener("127.0.0.1", 0)) as url:
        yield httpx.AsyncClient(base_url=url, headers={"X-API-Key": "key"}, timeout=30)


@asynccontextmanager
async def by_http(kitchen: Kitchen) -> AsyncIterator[Ask]:
    with kitchen_app(kitchen) as client:

        async def ask(name: str, *arguments: Any, tell: Callable[..., None] | None = None) -> Any:
            reply = Reply(TABLE, name, TABLE.write_arguments(name, arguments), tell)
            async with client.stream("POST", f"/calls/{name}", content=reply.body) as response:
                assert response.status_code == 200
                async for part in response.aiter_bytes():
                    if reply.take(part):
                        return reply.result()
            raise AssertionError

        async with client:
            yield ask


@pytest.mark.filterwarnings("ignore:Pydantic serializer warnings")
@pytest.mark.parametrize("connected", [by_socket, by_http])
async def test_a_call_brings_its_result_its_progress_and_its_error(connected: Any):
    told: list[tuple[int, int]] = []
    async with connected(Kitchen()) as ask:
        baked = await ask("bake", LOAF, math.nan)
        assert math.isnan(baked.weights[0]) and list(map(str, baked.weights[1:])) == ["0.1", "-0.0", "inf"]
        assert await ask("count", 3, tell=lambda *step: told.append(step)) == "counted"
        assert told == [(0, 3), (1, 3), (2, 3)]
        with pytest.raises(Spoilt) as caught:
            await ask("spoil")
        error = caught.value
        assert (error.parts, str(error), error.where) == ((1, 2), "part 1: 2 parts. Look.", "part 1")
        # Neither side trusts the other: one reads the arguments, the other one progress and result.
        with pytest.raises(Failure, match=r"arguments of 'bake' .* at 0\.slices: .*; there is 'x' \(str\)"):
            await ask("bake", replace(LOAF, slices="x"), 1.0)
        with pytest.raises(Failure, match=r"result of 'lie' .* at slices: .*; there is 'many' \(str\)"):
            await ask("lie")


@given(st.lists(st.floats()))
def test_numbers_cross_bit_for_bit(numbers: list[float]):
    def bits(values: list[float]) -> list[bytes]:
        return [b"nan" if math.isnan(value) else struct.pack("d", value) for value in values]

    loaf, _ = TABLE.read_arguments("bake", TABLE.write_arguments("bake", (Loaf(1, numbers), 1.0)))
    assert bits(loaf.weights) == bits(numbers)


def test_a_truth_where_a_number_is_declared_crosses_as_one():
    """As a metric that an operator's own code has made, which a learner in the same process takes too."""
    loaf, factor = TABLE.read_arguments("bake", TABLE.write_arguments("bake", (Loaf(1, [True]), True)))
    assert [type(value) for value in (*loaf.weights, factor)] == [float, float]


@pytest.mark.parametrize("way", ["cancel", "tell"])
async def test_a_call_ends_where_its_caller_goes_or_does_not_want_it_and_others_continue(way: str):
    kitchen = Kitchen()
    async with by_socket(kitchen) as ask:

        def unwelcome() -> None:
            raise KeyError("enough")

        waiting = asyncio.ensure_future(ask("wait", tell=unwelcome if way == "tell" else None))
        await kitchen.waiting.wait()
        assert await ask("count", 2) == "counted", "while it waits"
        if way == "cancel":
            waiting.cancel()
        with pytest.raises(asyncio.CancelledError if way == "cancel" else KeyError):
            await waiting
        await kitchen.stopped.wait()
        assert await ask("count", 2) == "counted"


async def test_a_call_over_http_ends_with_its_connection():
    kitchen = Kitchen()
    with kitchen_app(kitchen) as client:
        async with client, client.stream("POST", "/calls/wait", content=b"[]") as response:
            async for part in response.aiter_bytes():
                assert part == b"progress []\n"
                break
        await until(kitchen.stopped.is_set)


async def test_what_cannot_be_a_call_is_refused_over_http():
    with kitchen_app(Kitchen()) as client:
        async with client:
            unknown = await client.post("/calls/fry", content=b"[]")
            large = await client.post("/calls/bake", content=b" " * (MOST + 1))
            stranger = await client.post("/calls/bake", headers={"X-API-Key": "other"})
    assert [unknown.status_code, large.status_code, stranger.status_code] == [404, 413, 401]
    assert "known: bake, count, wait" in unknown.json()["detail"]
    assert large.json()["code"] == BodyTooLarge.code
    assert type(TABLE.refusal("http://h", 413, None, large.content)) is Failure, "of no class of the tree"
    assert "redirects to 'http://b/x'" in str(TABLE.refusal("http://h", 307, "http://b/x", b""))
    assert "answered 502, and not as" in str(TABLE.refusal("http://h", 502, None, b"<html>"))


async def test_a_caller_that_reads_nothing_fills_no_memory():
    lines = [line async for line in reply_lines(TABLE, Kitchen(), "count", b"[1000000]")]
    assert len(lines) < 20_000 and lines[-1].startswith(b"error ")
    assert b"the caller of 'count' does not read its progress" in lines[-1]


FAULTY = [
    b"\n", b"\xff\xfe\n", b"fry 1\n", b"result\n", b"result [\n", b"result []\n", b"result [3]\n",
    b"error {}\n", b'result ["a", "b"]\n', b"progress [1]\n", b'progress [1, "2"]\n',
    b"progress " + b"[" * 5_000 + b"\n",
    b'error {"classes": [], "code": "x"}\n', b'result ["a"]\nresult ["b"]\n',
    b'result ["a"]\nprogress [1, 2]\n',
    b'error {"classes": ["Spoilt"], "code": "x", "detail": "d", "more": {"parts": ["a"]}}\n',
    b"result " + b"x" * MOST + b"\n", b"x" * (MOST + 1),
]  # fmt: skip


def heard(content: bytes, cut: int = 10**9) -> Any:
    reply = Reply(TABLE, "count")
    for start in range(0, len(content), cut):
        if reply.take(content[start : start + cut]):
            return reply.result()
    return None


def test_a_reply_is_read_however_it_is_cut():
    assert heard(b'progress [1, 2]\nresult ["a"]\n', cut=1) == "a"


@pytest.mark.parametrize("content", FAULTY)
def test_a_faulty_reply_is_a_failure_that_names_its_call(content: bytes):
    with pytest.raises(Failure, match="'count'"):
        heard(content)


@given(st.binary(max_size=60), st.integers(1, 9))
def test_no_bytes_of_a_stranger_raise_anything_else(content: bytes, cut: int):
    for start in (b"", b"progress ", b"result ", b"error "):
        try:
            heard(start + content + b"\n", cut)
        except Failure as error:
            assert len(str(error)) < 600


def test_a_key_that_comes_twice_is_refused_wherever_it_stands():
    loaf = b'{"slices": 1, "slices": 2, "weights": []}'
    lines = (
        b"progress [%s]\n",
        b"result [%s]\n",
        b'error {"classes": [], "code": "c", "detail": "d", "more": %s}\n',
    )
    readers = [lambda line=line % loaf: _risen(line) for line in lines]
    readers.append(lambda: TABLE.read_arguments("bake", b"[%s, 1.0]" % loaf))
    for read in readers:
        with pytest.raises(Failure, match="'slices' comes twice"):
            read()
    problem = b'{"title": "t", "status": 400, "code": "kit_spoilt", "code": "c", "detail": "d"}'
    assert "answered 400, and not as" in str(TABLE.refusal("http://h", 400, None, problem))


def _risen(line: bytes) -> Any:
    reply = Reply(TABLE, "rise")
    return reply.take(line) and reply.result()


def test_a_reply_may_be_as_long_as_its_arguments_allow():
    line = b"result " + b"x" * MOST
    for body, fault in ((b"[3]", "more than 10006 bytes"), (b"[30]", "does not fit its type")):
        reply = Reply(TABLE, "count", body)
        with pytest.raises(Failure, match=fault):
            assert reply.take(line + b"\n") and reply.result()


def test_an_error_is_of_the_nearest_known_class_and_says_whether_another_attempt_may_help():
    full = KitError("half of a character: \ud83d")
    full.__cause__ = OSError(28, "No space left on device")

    class OfThatProcess(KitError):
        pass

    back = TABLE.read_error(TABLE.write_error(full, "bake").removeprefix(b"error "), "bake")
    assert type(back) is KitError and back.detail == "half of a character: ?"
    assert isinstance(back.__cause__, OSError) and back.__cause__.errno == 28
    body = ErrorBody.of(OfThatProcess("x"))
    assert (
        type(body.model_copy(update={"classes": ("OfALibrary", "Spoilt")}).error(KitError, Failure)) is Spoilt
    )
    assert type(body.model_copy(update={"classes": ("OfALibrary",)}).error(KitError, Failure)) is Failure
    line = TABLE.write_error(ValueError("of a library"), "bake")
    assert str(TABLE.read_error(line[6:], "bake")).startswith("'bake' met ValueError: of a library")


@asynccontextmanager
async def stranger(most: int = 1 << 20) -> AsyncIterator[tuple[Caller, asyncio.StreamWriter, Any]]:
    """A caller whose other end is bytes; and a call of it that waits."""
    ours, theirs = socket.socketpair()
    caller = Caller(TABLE)
    await caller.connect(ours)
    reader, writer = await asyncio.open_connection(sock=theirs, limit=most)
    call = asyncio.ensure_future(caller.call("count", 3))
    assert await reader.readline() == b"1 call count [3]\n"
    yield caller, writer, call
    caller.close()
    writer.close()


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"1 progress [0, 3]\n", "its process has ended"),
        (b"one result [3]\n", "its process said could not be read: ValueError: no number"),
        (b"9" * 40 + b" result\n", "no number of a call"),
        (b"x" * (TABLE.most_reply_bytes + 1), "ReplyTooLarge"),
    ],
)
async def test_a_connection_that_breaks_or_cannot_be_understood_ends_all_its_calls(content, reason):
    async with stranger() as (caller, writer, call):
        writer.write(content)
        await writer.drain()
        writer.close()
        with pytest.raises(Unanswered, match=reason):
            await call
        with pytest.raises(Unanswered, match=reason):
            await caller.call("spoil")


async def test_a_faulty_reply_over_a_socket_fails_its_call_alone():
    async with stranger() as (caller, writer, call):
        other = asyncio.ensure_future(caller.call("spoil"))
        writer.write(b"7 result [1]\n1 fry\n2 result [null]\n1 result []\n")
        with pytest.raises(Failure, match="it has the line b'fry' \\(bytes\\)"):
            await call
        assert await other is None


@pytest.mark.parametrize(
    "content",
    [
        b"call count [1]\n", b"1 fry\n", b"1 call fry []\n", b"1 call wait []\n1 call wait []\n",
        b"1 call \xff []\n", b"\n",
    ],
)  # fmt: skip
async def test_a_server_cuts_a_caller_that_it_cannot_understand_and_ends_its_calls(content: bytes):
    ours, theirs = socket.socketpair()
    kitchen = Kitchen()
    serving = asyncio.ensure_future(serve_calls(TABLE, kitchen, theirs))
    _, writer = await asyncio.open_connection(sock=ours)
    writer.write(b"3 call count [1]\n4 stop\n" + content)
    assert "what its caller said could not be read" in await serving
    assert kitchen.waiting.is_set() == kitchen.stopped.is_set()
    writer.close()
