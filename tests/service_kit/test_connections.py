"""Clients that say nothing, or never finish, over real sockets: of the gateway and of the trainer."""

import asyncio
import json
import resource
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import SecretStr
from starlette.requests import ClientDisconnect

from service_kit.connections import connections_at_most
from service_kit.gate import Gate, KeyDoor, while_connected, whole_body
from service_kit.keys import Keys
from service_kit.server import Listener, ServerThread
from service_kit.settings import ConnectionSettings
from tests.trainer_backend.jobs.on_a_port import on_a_port
from tests.trainer_backend.jobs.served import LONG_S, settings_for
from trainer_backend.inference.asgi import error_response
from trainer_backend.inference.gateway_app import create_gateway

KEY = "right"
GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def served(app: Any = None, **bounds: Any) -> Iterator[str]:
    """An app, by default a gateway."""
    app, listener = app or create_gateway({}, key=KEY), Listener("127.0.0.1", 0)
    with ServerThread(app, listener, ConnectionSettings(**bounds), respond=error_response) as url:
        yield url


@pytest.fixture(scope="module")
def patient() -> Iterator[str]:
    """A gateway that waits for its clients, and takes heads of 4096 bytes."""
    with served(max_header_bytes=4096) as url:
        yield url


@pytest.fixture(scope="module")
def impatient() -> Iterator[str]:
    with served(max_header_s=0.2) as url:
        yield url


@contextmanager
def trainer(folder: Path, **bounds: Any) -> Iterator[str]:
    """The service that has no gateway, but jobs."""
    settings = settings_for(folder, environ={"TRAINER_API_KEY": KEY}, jobs=False)
    with on_a_port(settings.model_copy(update=bounds)) as (url, _):
        yield url


@contextmanager
def connected(url: str) -> Iterator[socket.socket]:
    host = httpx.URL(url)
    with socket.create_connection((host.host, host.port or 80), LONG_S) as client:
        yield client


def to_the_end(client: socket.socket) -> bytes:
    """All that comes until the service closes the connection."""
    told = b""
    with suppress(ConnectionResetError):  # how a close with bytes unread on the other side may arrive
        while part := client.recv(65_536):
            told += part
    return told


def refusal_of(url: str, said: bytes) -> tuple[bytes, dict[str, Any]]:
    """Head and problem of the only answer on a connection."""
    with connected(url) as client:
        client.sendall(said)
        head, _, body = to_the_end(client).partition(b"\r\n\r\n")
    return head, json.loads(body)


def status_of_the_next(client: socket.socket) -> int:
    """Answer on a connection that stays; head and body may come one after the other."""
    answer = HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer.status


@pytest.mark.parametrize(
    ("said", "answers"), [(b"", 0), (b"GET / HT", 0), (GET, 0), (GET + b"\r\n" + b"GET /he", 1)]
)
def test_a_connection_that_says_nothing_or_half_a_head_is_closed(impatient, said, answers):
    with connected(impatient) as client:
        client.sendall(said)
        assert to_the_end(client).count(b"HTTP/1.1 200") == answers
    assert httpx.get(f"{impatient}/health").status_code == 200


def test_the_second_head_of_a_connection_is_waited_for_no_longer(impatient):
    with connected(impatient) as client:
        client.sendall(GET + b"\r\n")
        assert b"200 OK" in client.recv(65_536)
        client.sendall(b"G")
        assert b"HTTP" not in to_the_end(client)


def test_who_is_answered_before_the_body_may_not_drip_it_for_ever():
    with served(max_body_s=0.2) as url, connected(url) as client:
        client.sendall(POST)
        assert b"HTTP/1.1 401" in client.recv(65_536)
        client.settimeout(0.01)
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(b" ")
                with suppress(TimeoutError):
                    if not client.recv(65_536):
                        raise ConnectionError


def test_who_sends_the_rest_of_a_refused_body_may_ask_again_on_the_same_connection(patient):
    with connected(patient) as client:
        client.sendall(POST)
        assert status_of_the_next(client) == 401
        client.sendall(b" " * 1_000_000 + GET + b"\r\n")
        assert status_of_the_next(client) == 200


@pytest.mark.parametrize("kind", ["trainer", "gateway"])
def test_more_connections_than_are_allowed_are_told_to_come_later(tmp_path, kind):
    service = trainer(tmp_path, max_connections=1) if kind == "trainer" else served(max_connections=1)
    with service as url, connected(url) as first:
        first.sendall(GET + b"\r\n")
        assert status_of_the_next(first) == 200
        head, problem = refusal_of(url, b"")
        assert head.startswith(b"HTTP/1.1 503 ") and problem["code"] == "too_many_connections"
        if kind == "trainer":
            assert b"retry-after: 5" in head
        else:
            assert problem["error"]["type"] == "server_error", "clients of OpenAI's read it too"
        first.sendall(GET + b"\r\n")
        assert status_of_the_next(first) == 200


def test_idle_connections_keep_no_client_away():
    with served(max_connections=3) as url, ExitStack() as stack:
        idle = [stack.enter_context(connected(url)) for _ in range(9)]
        assert httpx.get(f"{url}/health").status_code == 200
        assert to_the_end(idle[0]) == b"", "the oldest gave way"


@pytest.mark.parametrize(
    "said",
    [
        b"GET /" + b"x" * 5000,
        b"GET /" + b"x" * 5000 + b" HTTP/1.1\r\n\r\n",
        GET + b"A: " + b"x" * 5000,
        GET + b"A: " + b"x" * 5000 + b"\r\n\r\n",
        GET + b"A: x\r\n" * 700,
    ],
    ids=["a path without end", "a long path", "a header without end", "a long header", "many headers"],
)
def test_a_head_that_is_too_large_is_refused(patient, said):
    head, problem = refusal_of(patient, said)
    assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head.lower()
    assert problem["code"] == "head_too_large"


@pytest.mark.parametrize(
    ("said", "where"),
    [
        (b"\x16\x03\x01 no http\r\n", None),
        (b"GET /info HTTP/1.1\r\n", "header Host"),
        (b"GET /info HTTP/1.0\r\nHost: localhost\r\nHost: localhost\r\n", "header Host"),
    ],
)
def test_what_is_no_http_or_names_not_one_host_as_rfc_9112_says_is_told_so(patient, said, where):
    head, problem = refusal_of(patient, said + b"Connection: close\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400 ") and b"application/problem+json" in head.lower()
    assert (problem["code"], problem.get("where")) == ("malformed_request", where)


def test_a_request_of_http_1_0_may_name_no_host(patient):
    with connected(patient) as client:
        client.sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert to_the_end(client).startswith(b"HTTP/1.1 200 ")


def test_connections_leave_half_of_the_descriptors_to_their_process():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (300, hard))
        assert (connections_at_most(4096), connections_at_most(10)) == (150, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("size", [10, 1_000_000])
def test_a_client_that_leaves_after_its_body_is_noticed_however_large_that_is(size):
    began, left = threading.Event(), threading.Event()

    async def work(scope, receive, send):
        if scope["type"] == "http":
            await whole_body(receive)
            began.set()
            with suppress(ClientDisconnect):
                await while_connected(asyncio.Event().wait(), receive)
            left.set()

    door = KeyDoor(Keys([SecretStr(KEY)], variable="KEY"), open_paths=["/work"])
    app = Gate(work, door=door, max_body_bytes=2 * size, max_body_s=LONG_S, unreadable=None)
    with served(app) as url:
        with connected(url) as client:
            client.sendall(b"POST /work HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % size)
            client.sendall(b"x" * size)
            assert began.wait(LONG_S)
        assert left.wait(LONG_S)
