"""uvicorn around an app: a port that is held or free, bounded connections, a stop in order."""

import asyncio
import ipaddress
import socket
import threading
from collections.abc import Awaitable, Callable
from types import FrameType
from typing import Self

import uvicorn
import uvloop
from starlette.types import ASGIApp

from service_kit.children import when_parent_ends
from service_kit.connections import ConnectionBounds, bounded_protocol
from service_kit.errors import PortTaken, ServiceError
from service_kit.problems import Respond, problem_response

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
BACKLOG = 2048
# Longer than clients keep idle connections: whoever closes first should be they.
KEEP_ALIVE_S = 75


class Listener:
    """A port that is held from now on; what connects waits until a server accepts. Use as a context manager.

    Bound here and not by uvicorn, which would end the process on a taken port.

    Args:
        host: an address or name of this machine; one that stands for all of them makes a `url` to call it
            on this machine alone.
        port: 0 takes a free one.
    """

    def __init__(self, host: str, port: int) -> None:
        self.socket = _bound_socket(host, port)
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self.socket.getsockname()[1]}"

    def close(self) -> None:
        """Let the port go; closing twice is harmless."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Server(uvicorn.Server):
    """Says when it is ready, and does what its service has to do before it stops.

    uvicorn stops listening before the app's lifespan ends, so the lifespan is too late for that.

    Args:
        respond: how an error is answered for which there is no request yet.
        max_message_bytes: of a WebSocket's frame.
        ready: is called when it accepts.
        stopping: is awaited before connections are closed; told whether the parent of this process has ended.
        insisted: is called when a second signal to stop comes, which then also cuts requests off; None: a
            second one changes nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        bounds: ConnectionBounds,
        *,
        respond: Respond = problem_response,
        max_message_bytes: int = 1 << 20,
        ready: Callable[[], None] | None = None,
        stopping: Callable[[bool], Awaitable[None]] | None = None,
        insisted: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=bounded_protocol(bounds, respond),
                ws_max_size=max_message_bytes,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=5,
            )
        )
        self._ready, self._stopping, self._insisted = ready, stopping, insisted
        self._orphaned = self._signalled = False

    def run_on(self, listener: Listener, *, exit_with_parent: bool = False) -> None:
        """Serve until somebody stops it, or the process that started this one has ended, however it ended."""
        if exit_with_parent:
            when_parent_ends(self._stop_orphaned)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self.serve([listener.socket]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._stopping is not None:
            await self._stopping(self._orphaned)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to stop; neither the first nor the second is an error."""
        self.should_exit = True
        if self._signalled and self._insisted is not None:
            self.force_exit = True
            self._insisted()
        self._signalled = True

    def _stop_orphaned(self) -> None:
        self._orphaned = self.should_exit = True


class ServerThread:
    """A server on a thread with an event loop of its own, so that its process can go on working.

    >>> with ServerThread(app, Listener("127.0.0.1", 0)) as url: ...     # port 0: any free one
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        bounds: ConnectionBounds | None = None,
        *,
        respond: Respond = problem_response,
    ) -> None:
        self._listener = listener
        self._over = threading.Event()  # the beginning is: it accepts, or never will
        self._server = Server(app, bounds or ConnectionBounds(), respond=respond, ready=self._over.set)
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve, and return the base URL."""
        self._thread = threading.Thread(target=self._serve, name="turnwise-server", daemon=True)
        self._thread.start()
        if not self._over.wait(START_TIMEOUT_S) or not self._server.started:
            self.stop()
            raise ServiceError("the server did not start", where=self._listener.url)
        return self._listener.url

    def stop(self) -> None:
        """Stop accepting, give open requests a few seconds, and wait for the thread."""
        self._server.should_exit = True
        if self._thread is not None:
            self._thread.join(STOP_TIMEOUT_S)
        self._listener.close()

    def __enter__(self) -> str:
        return self.start()

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def _serve(self) -> None:
        try:
            self._server.run_on(self._listener)
        finally:
            self._over.set()


def _bound_socket(host: str, port: int) -> socket.socket:
    bound: socket.socket | None = None
    try:
        # Without a host: all addresses.
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = places[0]
        bound = socket.socket(family, kind, protocol)
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
        # Without it, small replies wait for the delayed acknowledgement of the other side.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.listen(BACKLOG)
    except OSError as error:
        if bound is not None:
            bound.close()
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Choose another port, or 0 for any free one.",
        ) from error
    return bound


def is_wildcard(host: str) -> bool:
    """Whether the host stands for every address of this machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
