"""Every client that sends a key, against servers that send it elsewhere or never stop."""

import gzip
import re
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Field
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route

from service_kit.replies import Lines, ReplyInvalid, ReplyTooLarge, read_reply, redirect_target
from service_kit.server import Listener, ServerThread
from shared_schemas.base import StrictReply
from tests.service_kit.clients import CLIENTS, ask_from_a_plug_in, learner


@contextmanager
def server(answer: Callable[[Request], Awaitable[Response]]) -> Iterator[Listener]:
    """A server that gives this answer to everything."""
    listener = Listener("127.0.0.1", 0)
    routes = [Route("/{path:path}", answer, methods=["GET", "POST", "DELETE"])]
    with ServerThread(Starlette(routes=routes), listener):
        yield listener


@pytest.mark.parametrize("ask", CLIENTS.values(), ids=CLIENTS)
async def test_no_client_follows_a_redirect_and_none_sends_its_key_to_another_address(ask):
    requests: list[str] = []

    async def listen(request: Request) -> Response:
        requests.append(request.url.path)
        return Response("{}", media_type="application/json")

    with server(listen) as other:

        async def redirect(request: Request) -> Response:
            return RedirectResponse(f"{other.url}{request.url.path}?token=t", 307)

        with server(redirect) as first, pytest.raises(Exception) as caught:
            await ask(first.url)
    assert requests == []
    assert type(caught.value).__module__.startswith(("task_app", "trainer_backend"))


@pytest.mark.parametrize(
    "ask", [*CLIENTS.values(), ask_from_a_plug_in, learner(lambda one: one.ask("open", "job"))]
)
async def test_no_client_inflates_a_reply(ask):
    async def answer(request: Request) -> Response:
        assert request.headers["Accept-Encoding"] == "identity"
        return Response(gzip.compress(bytes(10_000_000)), headers={"Content-Encoding": "gzip"})

    with server(answer) as at, pytest.raises(Exception, match="has the Content-Encoding 'gzip'"):
        await ask(at.url)


def test_each_session_of_a_client_is_made_by_the_one_function_that_refuses_encoded_replies():
    # Of other programs: a harness inside the library's own process, which asks the task app.
    packages = ("service_kit", "shared_schemas", "task_app", "trainer_backend", "turnwise")
    files = {
        file for package in packages for file in Path(package).rglob("*.py") if "children" not in file.parts
    }
    makes = {str(file) for file in files if re.search(r"\b(ClientSession|Client)\(", file.read_text())}
    assert makes == {"service_kit/replies.py"}


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("task app, a page", "services.task_url must name the final address"),
        ("the terminal, jobs", "Name the final address with --url or TURNWISE_URL"),
        ("a learner, about", "The launcher must know the process's final address"),
    ],
)
async def test_an_address_that_redirects_is_named_with_the_other_one_and_what_to_do(name, hint):
    async def redirect(request: Request) -> Response:
        return RedirectResponse("https://me:word@other.example/rollouts?token=t", 308)

    with server(redirect) as first, pytest.raises(Exception, match=re.escape(hint)) as caught:
        await CLIENTS[name](first.url)
    assert first.url in str(caught.value) and "'https://other.example/rollouts'" in str(caught.value)
    assert "word" not in str(caught.value) and "token" not in str(caught.value)


def test_a_line_may_come_in_parts_and_a_stream_may_be_longer_than_its_longest_line():
    lines = Lines(4)
    parts = (b"ab", b"cd\n\n", b"e\rf\nabcd", b"\n") * 2
    assert [lines.take(part) for part in parts] == [[], [b"abcd", b""], [b"e\rf"], [b"abcd"]] * 2
    for part in (b"abcde", b"abcde\n"):
        with pytest.raises(ReplyTooLarge, match="more than 4 bytes"):
            Lines(4).take(part)


class Place(StrictReply):
    x: float
    at: tuple[Annotated[int, Field(ge=0)], ...] = ()


@pytest.mark.parametrize(
    ("reply", "finding"),
    [
        (b'{"x": 1, "at": [2], "more": NaN}', None),
        (b'{"at": []}', "x is missing; the reader needs it"),
        (b'{"x": true}', "x is True (bool); it should be a valid number"),
        (b'{"x": 1e999}', "x is inf (float); it should be a finite number"),
        (b'{"x": 0, "at": [0, "7"]}', "at.1 is '7' (str); it should be a valid integer"),
        (b'{"x": 0, "at": [-1]}', "at.0 is -1 (int); it should be greater than or equal to 0"),
        (
            b'{"x": [1, 2, 3, 4, 5, 6, 7, 8]}',
            "x is [1, 2, 3, 4, 5, 6, ...] (list); it should be a valid number",
        ),
        (b"[]", "its reply is [] (list); it should be an object"),
        (b" ", "its reply is empty; JSON is needed (EOF while parsing a value at line 1 column 1)"),
    ],
)
def test_what_is_wrong_with_a_reply_is_told_with_its_part_field_and_value(reply: bytes, finding: str | None):
    if finding is None:
        assert read_reply(Place, reply, "GET /place") == Place(x=1.0, at=(2,))
        return
    with pytest.raises(ReplyInvalid) as caught:
        read_reply(Place, reply, "GET /place")
    assert str(caught.value) == f"GET /place: {finding}"


@pytest.mark.parametrize(
    ("status", "location", "target"),
    [
        (200, "http://b/", None),
        (400, "http://b/", None),
        (301, "https://b", "'https://b'"),
        (302, "/login", "'http://a:1/login'"),
        (304, None, "nowhere"),
        (307, "http://[", "nowhere"),
        (307, "http://b/\x1b", r"'http://b/\x1b'"),
    ],
)
def test_a_redirect_is_told_by_its_status(status: int, location: Any, target: str | None):
    assert redirect_target(status, location, "http://a:1/x") == target
