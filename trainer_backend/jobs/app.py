"""The trainer service as a FastAPI app: its routes, the gate before them, and its background tasks."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import structlog
from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.middleware.errors import ServerErrorMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from service_kit.gate import Gate, SessionDoor
from service_kit.observed import RequestObserver
from service_kit.problems import (
    describe,
    install_problem_handlers,
    internal_error_response,
    problem_response,
)
from service_kit.release import version
from trainer_backend.errors import ApiError, TrainerError
from trainer_backend.jobs import events, launcher, login, routes, run_routes
from trainer_backend.jobs.login import LOGIN
from trainer_backend.jobs.posted import describe_fault
from trainer_backend.jobs.service import Service
from trainer_backend.jobs.slots import wait_for_threads

log = structlog.get_logger("trainer")

# Paths that need no key: the health check and the log-in page.
OPEN_PATHS = frozenset({"/health", LOGIN})
_STREAM = "/jobs/{job_id}/events"


class TrainerApp(FastAPI):
    """A FastAPI app that sends each request to `front`; wrap `front` to add guards before all middleware."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.front: ASGIApp = super().__call__

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.front(scope, receive, send)


def create_app(service: Service, *, pages: Sequence[APIRouter] = ()) -> TrainerApp:
    """Build the app, including the dashboard's routers `pages`. Its lifespan starts the background tasks."""
    app = TrainerApp(
        title="Turnwise trainer",
        version=version(),
        docs_url=None,
        redoc_url=None,
        lifespan=_lifespan,
    )
    app.state.service = service
    routers = (routes.router, run_routes.router, events.router, launcher.router, routes.info_router)
    for router in (*routers, login.router, *pages):
        # Not added by include_router, which would build the models of each route again for each app.
        app.router.routes.extend(router.routes)
    install_problem_handlers(app)
    app.add_exception_handler(TrainerError, _answer_error)
    app.add_exception_handler(RequestValidationError, _answer_invalid_request)
    describe(app, open_paths=OPEN_PATHS)
    settings, keys = service.settings, service.keys
    door = SessionDoor(
        keys, service.sessions.match, open_paths=OPEN_PATHS, open_below=["/static/"], login=LOGIN
    )
    # The wrapper that is added last receives a request first.
    front: ASGIApp = Gate(
        app.front,
        door=door,
        max_body_bytes=settings.max_body_bytes,
        max_body_s=settings.max_body_s,
        unreadable=ApiError,
    )
    front = ServerErrorMiddleware(front, handler=internal_error_response)
    app.front = RequestObserver(front, requests=service.requests, keys=keys, streams=[_STREAM])
    return app


async def _answer_error(request: Request, error: Exception) -> Response:
    """Return the reply to a TrainerError; log the error if the service is at fault."""
    assert isinstance(error, TrainerError)
    if error.status >= 500:
        log.warning("request_failed", method=request.method, path=request.url.path, detail=str(error))
    return problem_response(error)


async def _answer_invalid_request(request: Request, error: Exception) -> Response:
    """Return the reply to a request with an invalid query, header or path; the reply describes one fault."""
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    place, *path = map(str, first["loc"])
    detail = describe_fault(first, path or [place], first.get("ctx", {}).get("known", ()))
    return problem_response(ApiError(detail, where=f"{place} {'.'.join(path)}".rstrip()))


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    """Run the background tasks. At the end, stop the jobs and wait for the threads that use the store."""
    service: Service = app.state.service
    supervisor = service.supervisor
    threads = [service.line.thread, *service.watcher.threads]
    tasks = [asyncio.ensure_future(service.watcher.run()), asyncio.ensure_future(service.sweeper.run())]
    if supervisor is not None:
        threads += supervisor.threads
        tasks.append(asyncio.ensure_future(supervisor.run()))
    try:
        yield
    finally:
        try:
            service.news.close()
            if supervisor is not None:
                await supervisor.close()
            for task in tasks:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
        finally:
            await wait_for_threads(threads, at_most_s=service.settings.store_s)
