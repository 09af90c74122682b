"""Builds the task app's FastAPI application: its routes, its middleware and its lifespan."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.connections import Posts
from service_kit.gate import Deadline, Gate
from service_kit.keys import TASK_APP_KEY, Keys
from service_kit.observed import RequestObserver
from service_kit.problems import describe, install_problem_handlers, internal_error_response
from service_kit.release import version
from task_app.captures.call_errors import CallErrors
from task_app.captures.door import CaptureDoor
from task_app.dialects import openenv, openenv_mcp, openenv_socket
from task_app.dialects.one_call import routes as one_call
from task_app.errors import CriticalError, InvalidRequest, boundary
from task_app.observing.spans import Spans
from task_app.plugins import PlugBoards, default_plug_boards
from task_app.routes import (
    by_id,
    captures,
    env,
    interaction,
    policy,
    rollouts,
    service,
    snapshots,
    steps,
    view,
)
from task_app.routes.validation import validation_response
from task_app.services import Services
from task_app.sessions.idempotency import Once
from task_app.settings import Settings

OPEN_PATHS = frozenset({"/", "/health"})
# Routes for whole rollouts and long polls. They are exempt from `request_deadline_s`, and have other limits.
LONG = frozenset({"/rollout", "/rollouts"})
_ROUTERS = (
    steps.router,
    captures.router,
    by_id.router,
    rollouts.runs_router,
    one_call.rollout_router,
    one_call.router,
    service.router,
    service.info_router,
    env.router,
    view.frames_router,
    view.router,
    policy.router,
    interaction.router,
    rollouts.router,
    openenv.router,
    openenv_mcp.router,
    openenv_socket.router,
    snapshots.router,
)


class TaskApp(FastAPI):
    """A FastAPI app whose requests first pass through `front`, the middleware that `create_app` adds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.front: ASGIApp = super().__call__
        # Functions that answer POSTs to certain paths directly in the connection, without this middleware.
        self.posts: Posts = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


def create_app(
    settings: Settings,
    *,
    boards: PlugBoards | None = None,
    needs_key: bool = True,
    spans: Spans | None = None,
) -> TaskApp:
    """Build the app, by default with the plug-ins of `plugins.py`. Background tasks start with its lifespan.

    Without an API key in `settings`, the app refuses all requests if `needs_key` is true, and answers only
    requests from this machine if `needs_key` is false.
    """
    keys = Keys(settings.api_keys, variable=TASK_APP_KEY, needed=needs_key)
    boards = replace(boards or default_plug_boards(), reach=settings)
    services = Services(settings, boards, keys, spans or Spans())
    app = TaskApp(
        title="Turnwise task app", version=version(), docs_url=None, redoc_url=None, lifespan=_lifespan
    )
    app.state.services = services
    # Each semaphore admits one drawing job at a time, so that threads stay free for episodes.
    app.state.replays, app.state.pictures = asyncio.Semaphore(1), asyncio.Semaphore(1)
    app.state.openenv_sockets = openenv_socket.Sockets(settings.max_sessions)
    for router in _ROUTERS:
        # Not include_router, because it would build the models of each route again for each app.
        app.router.routes.extend(router.routes)
    # The paths for /info. app.openapi() would also give them, but it blocks the event loop for half a second.
    app.state.paths = tuple(dict.fromkeys(
        route.path_format for router in _ROUTERS for route in router.routes
        if isinstance(route, APIRoute) and route.include_in_schema
    ))  # fmt: skip
    install_problem_handlers(app)
    app.add_exception_handler(RequestValidationError, validation_response)
    describe(app, open_paths=OPEN_PATHS, errors=captures.REFUSALS)
    _add_middleware(app, services)
    return app


def _add_middleware(task_app: TaskApp, services: Services) -> None:
    """Wrap the app in its middleware, innermost layer first, and fill `task_app.posts`."""
    settings, keys = services.settings, services.keys
    app: ASGIApp = Once(task_app.front, database=services.database)
    app = Deadline(app, at_most_s=settings.request_deadline_s, long=LONG)
    app = captures.CallWay(app, services)
    door = CaptureDoor(
        keys,
        services.captures,
        open_paths=OPEN_PATHS,
        open_below=[f"/{name}" for name in settings.open_routes],
        basic_posts="/openenv/",
    )
    gate = Gate(
        app,
        door=door,
        max_body_bytes=settings.max_body_bytes,
        max_body_s=settings.max_body_s,
        unreadable=InvalidRequest,
        read=captures.read_body,
        large_body_hint="send a list in several requests; one document needs more TURNWISE_MAX_BODY_BYTES",
    )
    app = CallErrors(ServerErrorMiddleware(gate, handler=internal_error_response), captures.find_dialect)
    task_app.front = observer = RequestObserver(app, requests=services.metrics.requests, keys=keys)
    step_at_once = partial(steps.answer_at_once, services, gate.plain_value)
    task_app.posts = {steps.ROUTE.path.encode(): partial(observer.answer, step_at_once)}


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
    """Remove expired sessions and results every `sweep_every_s` seconds, until cancelled."""
    while True:
        await asyncio.sleep(services.settings.sweep_every_s)
        # Continue after an error, which boundary() logs: without the sweep, sessions would accumulate.
        with suppress(CriticalError), boundary("expiry"):
            services.expire()
