"""The task app as FastAPI: routes, the gate before them, what lives as long as the service."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version

from fastapi import FastAPI

from task_app.auth import Keys
from task_app.gate import Gate
from task_app.openapi import describe, problem_responses
from task_app.plugins import PlugBoards, default_plug_boards
from task_app.routes import env, frames, info, policy, rollouts, service
from task_app.routes.problems import install_problem_handlers
from task_app.services import Services
from task_app.settings import Settings


def create_app(settings: Settings, *, boards: PlugBoards | None = None) -> FastAPI:
    """Build the app. Nothing runs and no connection is open before its lifespan starts.

    Args:
        settings: bounds and keys.
        boards: what requests may name; the plug boards of `plugins.py` when absent.
    """
    keys = Keys(settings)
    services = Services(settings, boards or default_plug_boards(), keys)
    app = FastAPI(
        title="Turnwise task app",
        version=version("turnwise"),
        docs_url=None,
        redoc_url=None,
        responses=problem_responses(),
        lifespan=_lifespan,
    )
    app.state.services = services
    for topic in (service, info, env, frames, policy, rollouts):
        app.include_router(topic.router)
    install_problem_handlers(app)
    describe(app)
    app.add_middleware(Gate, keys=keys, max_body_bytes=settings.max_body_bytes)
    return app


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    services: Services = app.state.services
    services.start()
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
        services.expire()
