"""A trainer service with actors for jobs, on a port of its own, served on a thread."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from tests.trainer_backend.api.served import acted
from trainer_backend.api.connections import bounded_protocol
from trainer_backend.api.server import app_of, open_service
from trainer_backend.api.service import Service
from trainer_backend.api.settings import Settings
from trainer_backend.inference.server import Listener
from trainer_backend.logs import configure_logs


@contextmanager
def on_a_port(settings: Settings) -> Iterator[tuple[str, Service]]:
    """Its URL, and what it works with; the dashboard is there too."""
    configure_logs()  # to stderr
    ready = threading.Event()

    class Server(uvicorn.Server):
        async def startup(self, sockets=None) -> None:  # type: ignore[no-untyped-def]
            await super().startup(sockets)
            ready.set()

    with Listener("127.0.0.1", 0) as listener, open_service(settings, command=acted) as service:
        http = bounded_protocol(settings)
        server = Server(
            uvicorn.Config(app_of(service), http=http, log_config=None, timeout_graceful_shutdown=5)
        )
        thread = threading.Thread(target=server.run, args=([listener.socket],), daemon=True)
        thread.start()
        try:
            assert ready.wait(60)
            yield listener.url, service
        finally:
            server.should_exit = True
            thread.join()
