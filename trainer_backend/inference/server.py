"""uvicorn on a thread of its own, so that a trainer or a test can serve an app and go on working."""

import asyncio
import ipaddress
import socket
import threading
from typing import Self

import uvicorn
import uvloop
from starlette.types import ASGIApp

from trainer_backend.connections import ConnectionBounds, bounded_protocol
from trainer_backend.errors import InferenceError, PortTaken
from trainer_backend.inference.asgi import error_response

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 30.0
BACKLOG = 2048


class GatewayServer:
    """Serves an ASGI app on a background thread with its own event loop (uvloop).

    >>> with GatewayServer(app, Listener("127.0.0.1", 0)) as url: ...     # port 0: any free one
    """

    def __init__(self, app: ASGIApp, listener: "Listener", bounds: ConnectionBounds | None = None) -> None:
        self._listener = listener
        config = uvicorn.Config(
            app,
            loop="uvloop",
            http=bounded_protocol(bounds or ConnectionBounds(), error_response),
            lifespan="auto",
            # Longer than clients keep idle connections: whoever closes first should be they.
            timeout_keep_alive=75,
            log_config=None,
            access_log=False,
            timeout_graceful_shutdown=5,
        )
        self._server = uvicorn.Server(config)
        self._started = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> str:
        """Serve, and return the base URL.

        Raises:
            InferenceError: the server did not come up in time.
        """
        self._thread = threading.Thread(target=self._serve, name="turnwise-gateway", daemon=True)
        self._thread.start()
        if not self._started.wait(START_TIMEOUT_S) or not self._server.started:
            self.stop()
            raise InferenceError("the gateway's server did not start", where=self._listener.url)
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
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(self._serve_async())

    async def _serve_async(self) -> None:
        serving = asyncio.ensure_future(self._server.serve(sockets=[self._listener.socket]))
        try:
            while not (self._server.started or serving.done()):
                await asyncio.sleep(0.001)
            self._started.set()
            await serving
        finally:
            self._started.set()


class Listener:
    """A port that is held from now on; what connects waits until a server accepts. Use as a context manager.

    Bound here and not by uvicorn, which would end the process on a taken port.

    Args:
        host: an address or name of this machine; one that stands for all of them makes a `url` to call it
            on this machine alone.
        port: 0 takes a free one.

    Raises:
        PortTaken: the port is in use or may not be bound.
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


def _bound_socket(host: str, port: int) -> socket.socket:
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
        # Without it, small replies wait for the delayed acknowledgement of the other side.
        bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        bound.listen(BACKLOG)
    except OSError as error:
        bound.close()
        raise PortTaken(
            f"port {port} cannot be bound: {error.strerror}",
            where=f"{host}:{port}",
            hint="Choose another port, or 0 for any free one.",
        ) from error
    return bound


def is_wildcard(host: str) -> bool:
    """Whether the host stands for every address of this machine."""
    try:
        return not host or ipaddress.ip_address(host).is_unspecified
    except ValueError:
        return False  # a name
