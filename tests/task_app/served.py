"""A task app behind a real socket, on the test's own event loop."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx

from service_kit.server import Listener, Server
from task_app.app import create_app
from task_app.observing.spans import Spans
from task_app.plugins import PlugBoards
from task_app.process import build_server
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards


@asynccontextmanager
async def served_app(
    plug_boards: PlugBoards | None = None,
    *,
    drain_s: float = 0.0,
    spans: Spans | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[httpx.AsyncClient, Server]]:
    """A client that sends the key, and the server to stop."""
    own = Settings(**{"api_keys": (KEY,), "drain_s": drain_s, **settings})
    app = create_app(own, boards=plug_boards or boards(), needs_key=bool(own.api_keys), spans=spans)
    listener = Listener("127.0.0.1", 0)
    ready = asyncio.Event()
    server = build_server(app, ready=ready.set)
    # Not serve(), which would take over pytest's signals.
    serving = asyncio.create_task(server._serve([listener.socket]))
    await ready.wait()
    headers = {"X-API-Key": KEY}
    async with httpx.AsyncClient(base_url=listener.url, headers=headers, timeout=20.0) as client:
        yield client, server
    server.should_exit = True
    await serving
    listener.close()
