"""Clients that connect and say nothing, or never finish, over real sockets."""

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.trainer_backend.api.on_a_port import on_a_port
from tests.trainer_backend.api.served import LONG_S, settings_for

GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
POST = b"POST /jobs HTTP/1.1\r\nHost: localhost\r\nX-API-Key: wrong\r\nContent-Length: 1000000\r\n\r\n"


@contextmanager
def served(folder: Path, **bounds: Any) -> Iterator[str]:
    settings = settings_for(folder, environ={"TRAINER_API_KEY": "right"}, max_jobs=0)
    with on_a_port(replace(settings, **bounds)) as (url, _):
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


@pytest.mark.parametrize(
    ("said", "answers"), [(b"", 0), (b"GET / HT", 0), (GET, 0), (GET + b"\r\n" + b"GET /he", 1)]
)
def test_a_connection_that_says_nothing_or_half_a_head_is_closed(tmp_path, said, answers):
    with served(tmp_path, max_head_s=0.2) as url:
        with connected(url) as client:
            client.sendall(said)
            assert to_the_end(client).count(b"HTTP/1.1 200") == answers
        assert httpx.get(f"{url}/health").status_code == 200


def test_the_second_head_of_a_connection_is_waited_for_no_longer(tmp_path):
    with served(tmp_path, max_head_s=0.2) as url, connected(url) as client:
        client.sendall(GET + b"\r\n")
        assert b"200 OK" in client.recv(65_536)
        client.sendall(b"G")
        assert b"HTTP" not in to_the_end(client)


def test_who_is_answered_before_the_body_may_not_drip_it_for_ever(tmp_path):
    with served(tmp_path, max_body_s=0.2) as url, connected(url) as client:
        client.sendall(POST)
        assert b"HTTP/1.1 401" in client.recv(65_536)
        client.settimeout(0.01)
        with pytest.raises(ConnectionError):
            while True:
                client.sendall(b" ")
                with suppress(TimeoutError):
                    if not client.recv(65_536):
                        raise ConnectionError


def test_requests_on_one_connection_do_not_run_out_of_time(tmp_path):
    with served(tmp_path, max_head_s=0.5) as url, httpx.Client(base_url=url) as client:
        for _ in range(100):
            assert client.get("/health").status_code == 200


def status_of_the_next(client) -> int:
    """Answer on a connection that stays; head and body may come one after the other."""
    answer = HTTPResponse(client)
    answer.begin()
    answer.read()
    return answer.status


def test_more_connections_than_are_allowed_are_told_to_come_later(tmp_path):
    with served(tmp_path, max_connections=1) as url, connected(url) as first:
        first.sendall(GET + b"\r\n")
        assert status_of_the_next(first) == 200
        with connected(url) as second:
            head, _, body = to_the_end(second).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503 ") and b"retry-after: 5" in head
        assert json.loads(body)["code"] == "too_many_connections"
        first.sendall(GET + b"\r\n")
        assert status_of_the_next(first) == 200
