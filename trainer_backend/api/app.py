"""The trainer service as FastAPI: routes, the gate before them, what lives as long as the service."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from typing import Any

from fastapi import APIRouter, FastAPI
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from trainer_backend.api import (
    control_routes,
    events_routes,
    info_routes,
    jobs_routes,
    launcher_routes,
    login,
    metrics_routes,
    run_routes,
)
from trainer_backend.api.gate import Gate
from trainer_backend.api.observed import Observed
from trainer_backend.api.openapi import describe, problem_responses
from trainer_backend.api.problems import install_problem_handlers, unforeseen
from trainer_backend.api.service import Service
from trainer_backend.supervising.line import ended

_THREADS = 24


class TrainerApp(FastAPI):
    """FastAPI behind its guards: as its own middleware they would stand inside it."""

    def __init__(self, **named: Any) -> None:
        super().__init__(**named)
        self.front: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


def create_app(service: Service, *, pages: Sequence[APIRouter] = ()) -> TrainerApp:
    """Build the app. Nothing runs before its lifespan starts.

    Args:
        pages: of the dashboard (dashboard.pages.router); they are no part of the API's description.
    """
    app = TrainerApp(
        title="Turnwise trainer",
        version=version("turnwise"),
        docs_url=None,
        redoc_url=None,
        responses=problem_responses(),
        lifespan=_lifespan,
    )
    app.state.service = service
    for topic in (
        jobs_routes,
        control_routes,
        run_routes,
        events_routes,
        launcher_routes,
        info_routes,
        metrics_routes,
        login,
    ):
        app.include_router(topic.router)
    for router in pages:
        app.include_router(router)
    install_problem_handlers(app)
    describe(app)
    settings = service.settings
    gate = Gate(
        app.front,
        keys=service.keys,
        max_body_bytes=settings.max_body_bytes,
        max_body_s=settings.max_body_s,
    )
    app.front = Observed(ServerErrorMiddleware(gate, handler=unforeseen), service.requests)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The supervisor and the watcher run as long as the service; then jobs are stopped in order."""
    service: Service = app.state.service
    async with _threads(service), _working(service):
        yield


@asynccontextmanager
async def _working(service: Service) -> AsyncIterator[None]:
    working = [asyncio.ensure_future(service.watcher.run()), asyncio.ensure_future(service.sweeper.run())]
    if service.supervisor is not None:
        working.append(asyncio.ensure_future(service.supervisor.run()))
    try:
        yield
    finally:
        service.news.close()
        if service.supervisor is not None:
            await service.supervisor.close()
        for task in working:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


@asynccontextmanager
async def _threads(service: Service) -> AsyncIterator[None]:
    """For requests; and at the end nobody works with the store any more, which is closed then.

    More than asyncio would take on a small machine: a database that hangs holds a thread for each question.
    """
    loop = asyncio.get_running_loop()
    threads = [ThreadPoolExecutor(_THREADS, "trainer"), *service.watcher.threads]
    if service.supervisor is not None:
        threads += service.supervisor.threads
    loop.set_default_executor(threads[0])
    try:
        yield
    finally:
        loop.set_default_executor(ThreadPoolExecutor())
        await ended(threads, at_most_s=service.settings.store_s)
