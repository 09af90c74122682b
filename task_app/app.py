"""The task app as FastAPI: routes, the gate before them, what lives as long as the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from task_app.dialects import openenv, openenv_mcp, openenv_socket
from task_app.errors import CriticalError, boundary
from task_app.guards.auth import Keys
from task_app.guards.content import Content
from task_app.guards.deadline import Deadline
from task_app.guards.gate import Gate
from task_app.guards.once import Once
from task_app.observing.observed import Observed
from task_app.openapi import describe, problem_responses
from task_app.plugins import PlugBoards, default_plug_boards
from task_app.routes import (
    branch,
    by_id,
    env,
    frames,
    info,
    interaction,
    legacy_rollout,
    metrics,
    named_env,
    policy,
    rollouts,
    runs,
    service,
    snapshots,
    steps,
    view,
)
from task_app.routes.problems import install_problem_handlers, unforeseen
from task_app.services import Services
from task_app.settings import Settings
from task_app.short_way import ShortWay


def create_app(settings: Settings, *, boards: PlugBoards | None = None) -> FastAPI:
    """Build the app. Nothing runs and no connection is open before its lifespan starts.

    Args:
        settings: bounds and keys.
        boards: what requests may name; the plug boards of `plugins.py` when absent.
    """
    keys = Keys(settings)
    services = Services(settings, boards or default_plug_boards(), keys)
    app = TaskApp(
        title="Turnwise task app",
        version=version("turnwise"),
        docs_url=None,
        redoc_url=None,
        responses=problem_responses(),
        lifespan=_lifespan,
    )
    app.state.services = services
    # Pictures are for people: they wait for one another, and leave the threads to those who play.
    app.state.replays, app.state.pictures = asyncio.Semaphore(1), asyncio.Semaphore(1)
    app.state.openenv_sockets = openenv_socket.Sockets(settings.max_sessions)
    for topic in (
        steps,
        by_id,
        runs,
        legacy_rollout,
        named_env,
        service,
        metrics,
        info,
        env,
        frames,
        view,
        policy,
        interaction,
        rollouts,
        openenv,
        openenv_mcp,
        openenv_socket,
        snapshots,
        branch,
    ):
        app.include_router(topic.router)
    install_problem_handlers(app)
    describe(app)
    app.front = _guarded(app.front, services)
    return app


class TaskApp(FastAPI):
    """FastAPI behind its guards: as its own middleware they would stand inside it."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.front: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


def _guarded(app: ASGIApp, services: Services) -> ASGIApp:
    """What stands before the routes; the last one is the first one met."""
    settings, keys = services.settings, services.keys
    app = Once(app, database=services.database)
    app = Deadline(app, at_most_s=settings.request_deadline_s)
    app = ShortWay(app, services)
    app = Content(app)
    app = Gate(app, keys=keys, max_body_bytes=settings.max_body_bytes, max_body_s=settings.max_body_s)
    app = Observed(app, metrics=services.metrics, keys=keys)
    return ServerErrorMiddleware(app, handler=unforeseen)


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.start()
    await services.recover()
    sweeper = asyncio.get_running_loop().create_task(_sweep(services))
    try:
        yield
    finally:
        sweeper.cancel()
        with suppress(asyncio.CancelledError):
            await sweeper
        await services.close()


async def _sweep(services: Services) -> None:
    """Look after what nobody uses any more, at intervals."""
    while True:
        await asyncio.sleep(services.settings.sweep_every_s)
        # What fails is in the log by then; a sweep that ended would let sessions pile up for ever.
        with suppress(CriticalError), boundary("expiry"):
            services.expire()
