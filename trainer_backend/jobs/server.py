"""`turnwise trainer`: builds the service from the operator's settings, and serves it with uvicorn."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager

import structlog

from service_kit.keys import TRAINER_KEY, Keys
from service_kit.logs import configure_logs
from service_kit.own_process import READY
from service_kit.server import Listener, Server
from trainer_backend.jobs.app import TrainerApp, create_app
from trainer_backend.jobs.check_process import CheckProcess
from trainer_backend.jobs.data_dir import Sweeper, open_data_dir, say_unusable
from trainer_backend.jobs.processes import Command, job_command
from trainer_backend.jobs.service import Service
from trainer_backend.jobs.sessions import LoginSessions
from trainer_backend.jobs.settings import Settings
from trainer_backend.jobs.slots import Line
from trainer_backend.jobs.supervisor import Supervisor
from trainer_backend.jobs.watcher import News, Watcher
from trainer_backend.operator_plugins import load_packages, load_plugins
from trainer_backend.store.database import open_store

log = structlog.get_logger("trainer")

# Seconds to wait for each thread at the end.
_LAST_S = 1.0
# More than asyncio's default on a small machine, since a hanging database blocks a thread per request.
_THREADS = 24


def serve_trainer(settings: Settings, say: Callable[[str], None], *, command: Command = job_command) -> None:
    """Serve until this process is told to stop.

    `say` receives lines for the user. `command` returns the command that trains the job of a run directory.
    """
    configure_logs(settings.log_level, form=settings.log_format)
    load_packages()
    load_plugins(settings.plugins, option="--plugins")  # a fault must end this start, not the first job
    # First open the port: if another service has it, this one must not touch that service's store.
    with (
        Listener(settings.host, settings.port) as listener,
        closing(CheckProcess(plugins=settings.plugins)) as checks,
        open_service(settings, checks, command=command) as service,
    ):
        checks.start()
        server = build_server(build_app(service), ready=lambda: say(f"{READY}{listener.url}"))
        say(f"store: {service.store.shown}; runs: {service.data.path}")
        for root in settings.roots:
            if reason := say_unusable(root, writes=False):
                say(f"jobs can name no file there: {reason}; its owner may run chmod -R a+rX {root}")
        say(f"dashboard: {settings.public_url or listener.url}")
        if settings.key_command and settings.api_key is not None:
            say(f"its key: {settings.key_command}")
        server.run_on(listener, exit_with_parent=settings.exit_with_parent)
    _exit_despite_stuck_threads()


def _exit_despite_stuck_threads() -> None:
    """Exit at once if a thread hangs in a database or disk call; a normal exit would wait for the thread."""
    threads = [
        thread for thread in threading.enumerate() if not (thread.daemon or thread is threading.main_thread())
    ]
    for thread in threads:
        thread.join(_LAST_S)
    stuck = [thread.name for thread in threads if thread.is_alive()]
    if stuck:
        log.warning("threads_left", threads=stuck)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def open_service(
    settings: Settings, checks: CheckProcess, *, command: Command = job_command
) -> Iterator[Service]:
    """Build the service and its parts, and close them at the end. The background tasks are not started."""
    with open_data_dir(settings.data_dir, runs_jobs=settings.jobs, plugins=settings.plugins) as data:
        store = open_store(settings.database_url)
        try:
            news = News()
            watcher = Watcher(store, data, news, tidies=settings.jobs, answer_s=settings.store_s)
            supervisor = None
            if settings.jobs:
                supervisor = Supervisor(store, data, news, watcher, settings, command=command)
            key = settings.api_key
            line = Line("trainer", store.shown, settings.store_s, threads=_THREADS)
            keys = Keys([] if key is None else [key], variable=TRAINER_KEY), LoginSessions(key)
            yield Service(
                settings, store, data, news, watcher, Sweeper(data), checks, supervisor, line, *keys
            )
        finally:
            store.close()


def build_app(service: Service) -> TrainerApp:
    """Build the app with the API and the dashboard."""
    from trainer_backend.jobs.submission import build_dashboard
    from trainer_backend.pages.app import router

    app = create_app(service, pages=[router])
    app.state.dashboard = build_dashboard(service)
    return app


def build_server(app: TrainerApp, *, ready: Callable[[], None]) -> Server:
    """Build a server that ends event streams on the first stop signal, and kills all jobs on the second."""
    service: Service = app.state.service
    supervisor = service.supervisor

    async def end_streams(_orphaned: bool) -> None:
        # uvicorn waits for running requests, such as event streams, before it ends the app.
        service.news.close()

    def kill_jobs() -> None:
        if supervisor is not None:
            supervisor.end_at_once()

    return Server(app, service.settings, ready=ready, before_stop=end_streams, on_second_signal=kill_jobs)
