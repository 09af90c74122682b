"""Scripts say whose time they measured, and what they lack, instead of a 0 or a traceback."""

import asyncio
import sys
import time

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.decision_rate import cpu_seconds, serving_cpu_seconds
from bench.http_batch import NoPeer, peer_parts
from bench.http_rates import running
from service_kit.server import Listener, ServerThread


async def busy(request: Request) -> Response:
    """Reply after 50 ms of CPU time."""
    until = time.thread_time() + 0.05
    while time.thread_time() < until:
        pass
    return Response()


def test_the_cpu_time_of_the_gateway_is_that_of_its_servers_thread():
    with ServerThread(Starlette(routes=[Route("/", busy)]), Listener("127.0.0.1", 0)) as url:
        before = cpu_seconds()
        assert httpx.get(url).status_code == 200
        spent = {who: seconds - before[who] for who, seconds in cpu_seconds().items()}
        assert spent["gateway"] >= 0.03  # the system counts in ticks of 10 ms
        with pytest.raises(SystemExit, match="no thread of this process is called turnwise-engine"):
            serving_cpu_seconds()


def test_a_python_without_the_peer_is_named_with_what_it_lacks():
    with pytest.raises(NoPeer, match="No module named 'openenv'"):
        peer_parts(sys.executable)


def test_a_server_that_ends_before_it_listens_is_told_with_its_last_words():
    async def start() -> None:
        async with running(sys.executable, "-c", "raise ImportError('no uvloop')"):
            raise AssertionError("it never listens")

    with pytest.raises(SystemExit, match="ended with exit code 1 before it listened: ImportError: no uvloop"):
        asyncio.run(start())
