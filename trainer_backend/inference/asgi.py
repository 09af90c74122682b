"""What of the gateway's edge is its own: replies and errors in a shape that the `openai` client reads too."""

import asyncio
import json
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import structlog
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from service_kit.errors import RouteError, ServiceError
from service_kit.problems import reply
from trainer_backend.errors import ContextLengthExceeded, RemoteRefused, TrainerError

log = structlog.get_logger(__name__)

_ROUTES = "Known: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health."
Result = TypeVar("Result")
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class Outgoing:
    """A `Send` that knows whether the reply has begun: an error after that cannot be a status any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        await self._send(message)

    async def fail(self, error: ServiceError) -> None:
        """The error as the reply, or as the last event of one that has begun."""
        if self._begun:
            event = b"data: " + problem_body(error) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        else:
            response = error_response(error)
            await self._send(
                {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
            )
            await self._send({"type": "http.response.body", "body": response.body})


async def boundary(app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a route; whatever it raises becomes one problem body, and nothing of ours leaks into it."""
    outgoing = Outgoing(send)
    try:
        await app(scope, receive, outgoing)
    except ClientDisconnect:
        return
    except ServiceError as error:
        await outgoing.fail(error)
    except Exception:
        log.exception("gateway_error", path=scope["path"])
        await outgoing.fail(TrainerError("the gateway failed; its log says why"))


def problem_body(error: ServiceError) -> bytes:
    """RFC 9457's fields beside OpenAI's `error` object; the counts too where the context is full."""
    body = error.problem().model_dump()
    body["error"] = {
        "message": str(error),
        "type": _error_type(error.status),
        "param": error.where,
        "code": error.code,
    }
    if isinstance(error, ContextLengthExceeded):
        body["prompt_tokens"] = error.prompt_tokens
        body["max_tokens"] = error.max_tokens
        body["max_model_len"] = error.max_model_len
    return json.dumps(body).encode()


def _error_type(status: int) -> str:
    """OpenAI's word, by which clients tell errors apart."""
    if status in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return "authentication_error"
    ours = status >= HTTPStatus.INTERNAL_SERVER_ERROR or status == RemoteRefused.status
    return "server_error" if ours else "invalid_request_error"


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Wait for some work; cancel it, which aborts its requests, when the client leaves first."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientDisconnect
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def json_response(send: Send, body: dict[str, Any]) -> None:
    data = json.dumps(body, separators=(",", ":")).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(data)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


class EventStream:
    """A reply of server-sent events, begun with the first of them."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(json.dumps(event, separators=(",", ":")).encode())

    async def end(self) -> None:
        """The event after which `openai` clients stop reading."""
        await self._write(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def error_response(error: ServiceError) -> Response:
    """The reply to an error; one of the router names the routes that there are."""
    if isinstance(error, RouteError):
        error.hint = _ROUTES
    return reply(error, problem_body(error))
