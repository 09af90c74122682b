"""A trainer service with actors for jobs, on a port of its own, served on a thread."""

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service_kit.logs import configure_logs
from service_kit.server import Listener
from tests.trainer_backend.jobs.served import acted, checks
from trainer_backend.jobs.server import build_app, build_server, open_service
from trainer_backend.jobs.service import Service
from trainer_backend.jobs.settings import Settings


@contextmanager
def on_a_port(settings: Settings) -> Iterator[tuple[str, Service]]:
    """Its URL, and what it works with; the dashboard is there too."""
    configure_logs()  # to stderr
    ready = threading.Event()
    with Listener("127.0.0.1", 0) as listener, open_service(settings, checks(), command=acted) as service:
        server = build_server(build_app(service), ready=ready.set)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener.socket])), daemon=True)
        thread.start()
        try:
            assert ready.wait(60)
            yield listener.url, service
        finally:
            server.should_exit = True
            thread.join(60)
