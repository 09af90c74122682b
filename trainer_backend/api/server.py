"""`turnwise trainer`: uvicorn around the app, from the operator's settings to a stop in order."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from types import FrameType

import structlog
import uvicorn
import uvloop

from trainer_backend.api.app import TrainerApp, create_app
from trainer_backend.api.auth import Keys
from trainer_backend.api.check_process import CheckProcess
from trainer_backend.api.problems import problem_response
from trainer_backend.api.service import Service
from trainer_backend.api.settings import Settings
from trainer_backend.connections import ConnectionBounds, bounded_protocol
from trainer_backend.inference.server import Listener
from trainer_backend.logs import configure_logs
from trainer_backend.running.parent import when_parent_ends
from trainer_backend.store.database import open_store
from trainer_backend.supervising.data_dir import open_data_dir
from trainer_backend.supervising.deleting import Sweeper
from trainer_backend.supervising.news import News
from trainer_backend.supervising.processes import Command, job_command
from trainer_backend.supervising.supervisor import Supervisor
from trainer_backend.supervising.watcher import Watcher

log = structlog.get_logger("trainer")

# For a thread that was told to end.
_LAST_S = 1.0


def serve_trainer(settings: Settings, say: Callable[[str], None], *, command: Command = job_command) -> None:
    """Serve until somebody stops it.

    Args:
        say: is given a line for the person who started it.
        command: what is started for a job.

    Raises:
        StoreError: the database does not answer, or is none of ours.
        RunDirectoryError: the data directory cannot be used.
        PortTaken: the port is in use.
    """
    configure_logs()
    flags = settings.flags
    # The port first: a taken one must not touch the store of the service that has it.
    with (
        Listener(flags.host, flags.port) as listener,
        closing(CheckProcess()) as checks,
        open_service(settings, checks, command=command) as service,
    ):
        checks.start()
        server = TrainerServer(app_of(service), on_ready=lambda: say(f"listening on {listener.url}"))
        if flags.exit_with_parent:
            server.stop_with_parent()
        say(f"store: {service.store.shown}; runs: {service.data.path}")
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(server.serve([listener.socket]))
    _leave_what_hangs()


def _leave_what_hangs() -> None:
    """End this process, where a thread hangs in a database or a disk: the interpreter would wait for it."""
    working = [one for one in threading.enumerate() if not (one.daemon or one is threading.main_thread())]
    for one in working:
        one.join(_LAST_S)
    hanging = [one.name for one in working if one.is_alive()]
    if hanging:
        log.warning("threads_left", threads=hanging)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


@contextmanager
def open_service(
    settings: Settings, checks: CheckProcess, *, command: Command = job_command
) -> Iterator[Service]:
    """What the routes work with; nothing of it runs yet."""
    with open_data_dir(settings.bounds.data_dir, runs_jobs=settings.rules.max_jobs > 0) as data:
        store = open_store(settings.database_url)
        try:
            news = News()
            answer_s, rules = settings.store_s, settings.rules
            watcher = Watcher(store, data, news, tidies=rules.max_jobs > 0, answer_s=answer_s)
            supervisor = (
                Supervisor(store, data, news, watcher, rules, command=command, answer_s=answer_s)
                if rules.max_jobs
                else None
            )
            keys = Keys(settings.api_key)
            yield Service(settings, store, data, news, watcher, Sweeper(data), checks, supervisor, keys)
        finally:
            store.close()


def app_of(service: Service) -> TrainerApp:
    """The whole application: the API, and the dashboard over it."""
    from trainer_backend.api.for_pages import dashboard_of
    from trainer_backend.dashboard import pages

    app = create_app(service, pages=[pages.router])
    app.state.dashboard = dashboard_of(service)
    return app


class TrainerServer(uvicorn.Server):
    """uvicorn as this service wants it. Says when it is ready; ends open event streams when it stops."""

    def __init__(self, app: TrainerApp, *, on_ready: Callable[[], None]) -> None:
        settings = app.state.service.settings
        bounds = ConnectionBounds(
            settings.max_connections, settings.max_head_s, max_body_s=settings.max_body_s
        )
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=bounded_protocol(bounds, problem_response),
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        self._app = app
        self._on_ready = on_ready
        self._told = False

    async def startup(self, sockets: "list | None" = None) -> None:  # type: ignore[type-arg]
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: "list | None" = None) -> None:  # type: ignore[type-arg]
        # Open event streams end first: uvicorn waits for requests that are under way before it ends the app.
        self._app.state.service.news.close()
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops jobs in order, the second kills them; neither is an error."""
        self.force_exit, self._told, self.should_exit = self._told, True, True
        supervisor = self._app.state.service.supervisor
        if self.force_exit and supervisor is not None:
            supervisor.end_at_once()

    def stop_with_parent(self) -> None:
        """Stop in order when the process that started this one has ended, however it ended."""

        def stop() -> None:
            self.should_exit = True

        when_parent_ends(stop)
