"""Runs a task app: loads the plug-ins, listens on the port, and serves until a stop signal."""

import asyncio
import gc
import os
from collections.abc import Callable
from dataclasses import replace

import structlog

from service_kit.keys import TASK_APP_KEY
from service_kit.logs import configure_logs
from service_kit.own_process import announce, end_imports
from service_kit.server import Listener, Server
from shared_schemas.urls import is_loopback
from task_app.app import TaskApp, create_app
from task_app.errors import CapacityReached
from task_app.interactions.config_file import load_interactions, package_interactions
from task_app.observing.spans import configure_spans
from task_app.operator_plugins import with_packages, with_plugins
from task_app.plugins import default_plug_boards
from task_app.replicas import run_replicas
from task_app.services import Services
from task_app.settings import Settings

log = structlog.get_logger("task_app")

# New objects between two garbage collections. The steps of an episode stay in memory until the episode is
# sent. With Python's default of 700, the collector examines these steps so often that this takes a tenth of
# the CPU time of a scripted policy's decisions.
_OBJECTS_A_COLLECTION = 10_000


def run(settings: Settings) -> int:
    """Serve until a stop signal, and return the exit code.

    Raises:
        SettingsError: a setting, a plug-in file or a file of interactions is invalid.
        PortTaken: the port is in use.
    """
    configure_logs(settings.log_level, form=settings.log_format)
    if settings.replicas is not None:
        end_imports()
        return asyncio.run(run_replicas(settings))
    boards = with_plugins(with_packages(default_plug_boards()), settings.plugins)
    interactions = package_interactions(settings)
    if settings.interaction_config_path is not None:
        interactions |= load_interactions(settings.interaction_config_path, settings)
    boards = replace(boards, interactions=interactions)
    # A key variable that is set but empty probably means that a secret failed to load. The app then refuses
    # requests instead of running without a key.
    wants_key = any(name.startswith(TASK_APP_KEY) for name in os.environ)
    needs_key = wants_key or not is_loopback(settings.host)
    app = create_app(settings, boards=boards, needs_key=needs_key, spans=configure_spans(os.environ))
    listener = Listener(settings.host, settings.port)
    if not settings.api_keys:
        told = "every route answers 503" if needs_key else "only this machine is answered"
        log.warning("no_key_configured", hint=f"{told} until {TASK_APP_KEY} is set")
    log.info("starting", address=listener.url)
    end_imports()
    gc.set_threshold(_OBJECTS_A_COLLECTION)
    server = build_server(app, ready=lambda: announce(listener.url))
    server.run_on(listener, exit_with_parent=settings.exit_with_parent)
    log.info("stopped", address=listener.url)
    return 0


def build_server(app: TaskApp, *, ready: Callable[[], None]) -> Server:
    """Return a server that drains on a stop signal: it still answers, but starts no rollouts or sessions."""
    services: Services = app.state.services
    settings = services.settings

    async def drain(orphaned: bool) -> None:
        # If the parent process has ended, no client is left that would fetch results, so do not wait.
        await services.drain(within_s=0.0 if orphaned else settings.drain_s)

    return Server(
        app,
        settings,
        too_many=CapacityReached,
        max_message_bytes=settings.max_body_bytes,
        posts=app.posts,
        ready=ready,
        before_stop=drain,
    )
