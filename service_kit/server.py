"""uvicorn around an app, with a reserved port, limited connections, and an orderly stop."""

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
# Linux allows net.core.somaxconn at most, whose default is 4096.
BACKLOG = 4096
# Longer than clients keep idle connections, so that they close first.
KEEP_ALIVE_S = 120
# bench/decision_rate.py finds the thread by this name.
SERVER_THREAD = "turnwise-server"


class Listener:
    """A reserved port; connections wait until a server accepts them. Use it as a context manager.

    uvicorn itself would end the process if the port is taken. Port 0 takes a free port.
    """

    def __init__(self, host: str, port: int) -> None:
        self._hold(_bind(host, port), host)

    @classmethod
    def inherited(cls, descriptor: int) -> Self:
        """Return a listener on the socket that this process inherits from its parent."""
        listener = cls.__new__(cls)
        held = socket.socket(fileno=descriptor)
        listener._hold(held, held.getsockname()[0])
        return listener

    def _hold(self, held: socket.socket, host: str) -> None:
        self.socket = held
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{held.getsockname()[1]}"

    def close(self) -> None:
        """Release the port; a second call does nothing."""
        self.socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class Server(uvicorn.Server):
    """Reports when it is ready, and runs the service's own work (`before_stop`) before it stops.

    The end of the app's lifespan would be too late for this work, because uvicorn has stopped listening then.

    Args:
        respond: makes the reply to an error of a connection, which has no request.
        too_many: error for connections beyond `max_connections`.
        max_message_bytes: limit of a WebSocket frame.
        posts: answers some requests without the app (service_kit.connections).
        ready: called when the server accepts connections.
        before_stop: awaited before connections are closed; its argument is True if the parent has ended.
        on_second_signal: called at a second stop signal, which also aborts requests; None: a second signal is
            ignored.
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
                backlog=BACKLOG,  # uvicorn calls listen() again with this number
                timeout_graceful_shutdown=5,
            )
        )
        self._ready, self._before_stop, self._on_second_signal = ready, before_stop, on_second_signal
        self._is_orphaned = self._got_signal = False

    def run_on(self, listener: Listener, *, exit_with_parent: bool = False) -> None:
        """Serve until stopped or, with `exit_with_parent`, until the parent process ends."""

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
        """Handle a stop signal, after which the process exits with code 0."""
        self.should_exit = True
        if self._got_signal and self._on_second_signal is not None:
            self.force_exit = True
            self._on_second_signal()
        self._got_signal = True


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine in a new event loop of uvloop, as servers do."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


class ServerThread:
    """Runs a server on a thread with its own event loop.

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
        """Serve, and return the base URL."""
        self._thread = threading.Thread(target=self._serve, name=SERVER_THREAD, daemon=True)
        self._thread.start()
        if not self._started_or_failed.wait(START_TIMEOUT_S) or not self._server.started:
            self.stop()
            raise ServiceError("the server did not start", where=self._listener.url)
        return self._listener.url

    def stop(self) -> None:
        """Stop accepting connections, give open requests a few seconds, and wait for the thread."""
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
        # An empty host means all addresses.
        places = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = places[0]
        bound_socket = socket.socket(family, kind, protocol)
        bound_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound_socket.bind(address)
        # Without it, small replies wait for the peer's delayed acknowledgement.
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
