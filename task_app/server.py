"""uvicorn around the task app: a port that may be taken or free, bounded connections, a stop that drains."""

import os
import socket
import sys
import threading
from collections.abc import Callable
from types import FrameType

import uvicorn
from fastapi import FastAPI

from task_app.guards.connections import bounded_protocol
from task_app.services import Services


class PortTaken(OSError):
    """The address cannot be listened on; the message is for the user."""


def bound_socket(host: str, port: int) -> socket.socket:
    """A listening socket on host:port; port 0 takes a free one.

    Raises:
        PortTaken: in use, not ours to use, or no such host.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as exc:
        raise PortTaken(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(2048)
    except OSError as exc:
        sock.close()
        raise PortTaken(f"cannot listen on {host}:{port}: {exc.strerror or exc}") from exc
    return sock


def address_of(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class Server(uvicorn.Server):
    """Says when it is ready, and drains when told to stop: still answering, but taking nothing new.

    uvicorn stops listening before the app's lifespan ends, so the lifespan is too late for that.
    """

    def __init__(self, app: FastAPI, *, on_ready: Callable[[], None]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                ws_max_size=app.state.services.settings.max_body_bytes,
                http=bounded_protocol(app.state.services.settings),
                log_config=None,
                access_log=False,
                server_header=False,
                # Longer than clients keep idle connections: whoever closes first should be they.
                timeout_keep_alive=75,
                timeout_graceful_shutdown=5,
            )
        )
        self._services: Services = app.state.services
        self._on_ready = on_ready
        self._orphaned = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started:
            self._on_ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # Without its parent, nobody is left to fetch what would end.
        within_s = 0.0 if self._orphaned else self._services.settings.drain_s
        await self._services.drain(within_s=within_s)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        # The first signal only: a second one must not skip the drain, or rollouts would be left running.
        self.should_exit = True

    def stop_with_parent(self) -> None:
        """Stop when stdin closes: the process that holds its other end has ended, however it ended."""

        def watch() -> None:
            # The descriptor itself: a thread inside sys.stdin would hold its lock when the interpreter ends.
            while os.read(sys.stdin.fileno(), 65_536):
                pass
            self._orphaned = self.should_exit = True

        threading.Thread(target=watch, name="parent-watch", daemon=True).start()
