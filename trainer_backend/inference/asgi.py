"""The gateway's edge: keys, bodies, disconnects, and errors in a shape that the `openai` client reads too."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Coroutine
from http import HTTPStatus
from typing import Any, TypeVar

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from trainer_backend.errors import (
    BadChatRequest,
    ContextLengthExceeded,
    InferenceUnauthorized,
    RemoteRefused,
    TrainerError,
)

log = structlog.get_logger(__name__)

Result = TypeVar("Result")
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTooLarge(BadChatRequest):
    code = "body_too_large"
    status = 413
    title = "Body too large"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


class Outgoing:
    """A `Send` that knows whether the reply has begun: an error after that cannot be a status any more."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._begun = False

    async def __call__(self, message: Message) -> None:
        self._begun = True
        await self._send(message)

    async def fail(self, error: TrainerError) -> None:
        """The error as the reply, or as the last event of one that has begun."""
        if self._begun:
            event = b"data: " + problem_body(error) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        else:
            await send_bytes(
                self._send, problem_body(error), status=error.status, media_type=PROBLEM_MEDIA_TYPE
            )


async def boundary(app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a route; whatever it raises becomes one problem body, and nothing of ours leaks into it."""
    outgoing = Outgoing(send)
    try:
        await app(scope, receive, outgoing)
    except ClientGone:
        return
    except TrainerError as error:
        await outgoing.fail(error)
    except Exception:
        log.exception("gateway_error", path=scope["path"])
        await outgoing.fail(TrainerError("the gateway failed; its log says why"))


def problem_body(error: TrainerError) -> bytes:
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


def authorize(scope: Scope, key: str) -> None:
    """Compare the Bearer key in constant time.

    Raises:
        InferenceUnauthorized: no key, or another one.
    """
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    if not hmac.compare_digest(given, b"Bearer " + key.encode()):
        what = "another key was given" if given else "no key was given"
        raise InferenceUnauthorized(what, where="Authorization", hint="Send 'Authorization: Bearer KEY'.")


async def read_body(scope: Scope, receive: Receive, *, most: int) -> bytes:
    """The whole body.

    Raises:
        BodyTooLarge: more than `most` bytes, by its header or by what arrives.
        ClientGone: the client left before its end.
    """
    length = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
    chunks: list[bytes] = []
    size = int(length) if length.isdigit() else 0
    more = size <= most
    received = 0
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone
        chunks.append(message.get("body", b""))
        received += len(chunks[-1])
        more = message.get("more_body", False) and received <= most
    if max(size, received) > most:
        raise BodyTooLarge(f"the body has more than {most} bytes", where="body")
    return b"".join(chunks)


async def while_connected(work: Coroutine[Any, Any, Result], receive: Receive) -> Result:
    """Wait for some work; cancel it, which aborts its requests, when the client leaves first.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        gone.cancel()
        task.cancel()


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def json_response(send: Send, body: dict[str, Any]) -> None:
    await send_bytes(send, json.dumps(body, separators=(",", ":")).encode())


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


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, media_type: str = "application/json"
) -> None:
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def trainer_error_response(request: Request, error: Exception) -> Response:
    """Starlette's handler for the routes that are not the hot one."""
    assert isinstance(error, TrainerError)
    return error_response(error)


def error_response(error: TrainerError) -> Response:
    return Response(problem_body(error), status_code=error.status, media_type=PROBLEM_MEDIA_TYPE)


async def http_error_response(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the same shape."""
    assert isinstance(error, HTTPException)
    problem = Problem(
        title=error.detail,
        status=error.status_code,
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        detail=f"{request.method} {request.url.path} is not served here",
        hint="Known: POST /v1/chat/completions, POST /v1/completions, GET /v1/models, GET /health.",
    )
    message = {
        "message": problem.detail,
        "type": "invalid_request_error",
        "param": None,
        "code": problem.code,
    }
    body = json.dumps({**problem.model_dump(), "error": message})
    return Response(body, status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=error.headers)
