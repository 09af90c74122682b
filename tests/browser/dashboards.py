"""A trainer service on a real port, with actors for jobs; and pages that keep what went wrong."""

import asyncio
import os
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import uvicorn

from tests.trainer_backend.api.served import acted, settings_for
from trainer_backend.api.server import app_of, open_service
from trainer_backend.api.service import Service
from trainer_backend.inference.server import Listener

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
DESKTOP, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}


class _Server(uvicorn.Server):
    def __init__(self, service: Service, begun: threading.Event) -> None:
        super().__init__(uvicorn.Config(app_of(service), log_config=None, timeout_graceful_shutdown=2))
        self._service, self._begun = service, begun

    async def startup(self, sockets=None) -> None:
        await super().startup(sockets)
        self._begun.set()

    async def shutdown(self, sockets=None) -> None:
        self._service.news.close()
        await super().shutdown(sockets)


@contextmanager
def dashboard(data_dir: Path, **environ: str) -> Iterator[tuple[str, Service]]:
    """Its address, and the service behind it."""
    begun = threading.Event()
    with (
        Listener("127.0.0.1", 0) as listener,
        open_service(settings_for(data_dir, environ=environ), command=acted) as service,
    ):
        server = _Server(service, begun)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener.socket])))
        thread.start()
        try:
            assert begun.wait(60)
            yield listener.url, service
        finally:
            server.should_exit = True
            thread.join(60)


class Watched:
    """A page of a browser, and what it complained of or asked of others.

    An answer that is an error is a line of the console too; `refused` says which of those are meant.
    """

    def __init__(self, browser, base: str, *, refused: tuple[int, ...] = (), **options) -> None:
        self.base, self.complaints, self.elsewhere = base, [], []
        self.page = browser.new_context(**options).new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("dialog", lambda dialog: self.complaints.append(dialog.message) or dialog.accept())
        self.page.on("console", self._heard)
        self.page.on("request", self._asked)
        self._refused = refused

    def _heard(self, line) -> None:
        meant = any(f"status of {status}" in line.text for status in self._refused)
        if line.type in ("error", "warning") and not meant:
            self.complaints.append(line.text)

    def _asked(self, request) -> None:
        if not request.url.startswith(self.base):
            self.elsewhere.append(request.url)

    def go(self, path: str) -> None:
        self.page.goto(self.base + path)

    def fits(self) -> bool:
        """Nothing is wider than the window."""
        return self.page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
