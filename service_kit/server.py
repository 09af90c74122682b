"""Runs an ASGI app on uvicorn, with a port reserved in advance, limited connections and an orderly stop."""

import asyncio
import socket
import threading
from collections.abc import Awaitable, Callable, Coroutine
from types import FrameType, MappingProxyType
from typing import Any, Self, TypeVar

import uvicorn
import uvloop
from starlette.types import ASGIApp

from service_kit.connections import Posts, bounded_protocol
from service_kit.errors import PortTaken, ServiceError, TooManyConnections
from service_kit.own_process import when_parent_ends
from service_kit.problems import Respond, problem_response
from service_kit.settings import ConnectionSettings

Result = TypeVar("Result")

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
# Most connections that wait to be accepted. Linux limits the number to net.core.somaxconn, by default 4096.
BACKLOG = 4096
# The server closes idle connections after this time. It is longer than the time-out of clients, so that
# clients close idle connections first.
KEEP_ALIVE_S = 120
# bench/decision_rate.py finds the thread by this name.
SERVER_THREAD = "turnwise-server"


class Listener:
    """Reserves a port, on which connections wait until a server accepts them. Use it as a context manager.

    Port 0 means any free port; `url` contains the actual port.

    Raises:
        PortTaken: the port cannot be used. In this case, uvicorn itself would end the process.
    """

    def __init__(self, host: str, port: int) -> None:
        self._hold(_bind(host, port), host)

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """Return a listener for an open socket that this process inherited from its parent.

        `descriptor` is the file descriptor of the socket.
        """
        listener = cls.__new__(cls)
        held = socket.socket(fileno=descriptor)
        listener._hold(held, held.getsockname()[0])
        return listener

    def _hold(self, held: socket.socket, host: str) -> None:
        self.socket = held
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{held.getsockname()[1]}"

    def close(self) -> None:
        """Release the port. Further calls have no effect."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Server(uvicorn.Server):
    """A uvicorn server with limited connections and with callbacks when it is ready and before it stops.

    Args:
        respond: makes the reply to an error that occurs on a connection before the app has a request.
        too_many: class of the error for a connection beyond `max_connections`.
        max_message_bytes: size limit of a WebSocket message.
        posts: functions that answer some POST requests without the app (see service_kit.connections).
        ready: called when the server begins to accept connections.
        before_stop: called and awaited when the server is about to stop but still accepts connections. The
            argument is True if it stops because the parent process ended. The shutdown event of the app's
            lifespan would come too late, because uvicorn no longer listens then.
        on_second_signal: called when the process receives a second stop signal, which also aborts open
            requests. If None, a second signal has no effect.
    """

    def __init__(
        self,
        app: ASGIApp,
        settings: ConnectionSettings,
        *,
        respond: Respond = problem_response,
        too_many: type[ServiceError] = TooManyConnections,
        max_message_bytes: int = 1 << 20,
        posts: Posts = MappingProxyType({}),
        ready: Callable[[], None] | None = None,
        before_stop: Callable[[bool], Awaitable[None]] | None = None,
        on_second_signal: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                loop="uvloop",
                http=bounded_protocol(settings, respond, too_many, posts),
                ws_max_size=max_message_bytes,
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_S,
                backlog=BACKLOG,  # needed because uvicorn calls listen() again with this number
                timeout_graceful_shutdown=5,
            )
        )
        self._ready, self._before_stop, self._on_second_signal = ready, before_stop, on_second_signal
        self._is_orphaned = self._got_signal = False

    def run_on(self, listener: Listener, *, exit_with_parent: bool = False) -> None:
        """Serve on the port of `listener` until the server is stopped.

        If `exit_with_parent` is true, the server also stops when the parent process ends.
        """

        def stop() -> None:
            self._is_orphaned = self.should_exit = True

        if exit_with_parent:
            when_parent_ends(stop)
        run(self.serve([listener.socket]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and self._ready is not None:
            self._ready()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._before_stop is not None:
            await self._before_stop(self._is_orphaned)
        await super().shutdown(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Begin to stop because of a signal; the process then exits with code 0."""
        self.should_exit = True
        if self._got_signal and self._on_second_signal is not None:
            self.force_exit = True
            self._on_second_signal()
        self._got_signal = True


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a new uvloop event loop, as servers do, and return its result."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class ServerThread:
    """Runs a server in a separate thread with its own event loop.

    >>> with ServerThread(app, Listener("127.0.0.1", 0)) as url: ...     # port 0: any free port
    """

    def __init__(
        self,
        app: ASGIApp,
        listener: Listener,
        settings: ConnectionSettings | None = None,
        *,
        respond: Respond = problem_response,
    ) -> None:
        self._listener = listener
        self._started_or_failed = threading.Event()
        self._server = Server(
            app, settings or ConnectionSettings(), respond=respond, ready=self._started_or_failed.set
        )
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Start the thread, wait until the server is ready, and return its base URL."""
        self._thread = threading.Thread(target=self._serve, name=SERVER_THREAD, daemon=True)
        self._thread.start()
        if not self._started_or_failed.wait(START_TIMEOUT_S) or not self._server.started:
            self.stop()
            raise ServiceError("the server did not start", where=self._listener.url)
        return self._listener.url

    def stop(self) -> None:
        """Stop accepting connections, give open requests a few seconds to finish, and wait for the thread."""
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
            self._started_or_failed.set()


def _bind(host: str, port: int) -> socket.socket:
    bound_socket: socket.socket | None = None
    try:
        # An empty host means all addresses of this machine.
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = places[0]
        bound_socket = socket.socket(family, kind, protocol)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
        # Without TCP_NODELAY, small replies would wait for the peer's delayed acknowledgement.
        bound_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound_socket.listen(BACKLOG)
    except OSError as error:
        if bound_socket is not None:
            bound_socket.close()
        raise PortTaken(
            f"cannot listen on {host}:{port}: {error.strerror or error}",
            hint="Choose another port, or 0 for any free one.",
        ) from error
    return bound_socket
