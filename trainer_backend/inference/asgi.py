"""The gateway's edge: keys, bodies, disconnects, and errors in a shape that the `openai` client reads too."""

import asyncio
import hmac
import json
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from trainer_backend.errors import BadChatRequest, ContextLengthExceeded, InferenceUnauthorized, TrainerError
from trainer_backend.inference.protocol import Generation

log = structlog.get_logger(__name__)

AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]


class BodyTooLarge(BadChatRequest):
    code = "body_too_large"
    status = 413
    title = "Body too large"


class ClientGone(Exception):
    """The client closed the connection; there is nobody to answer."""


async def boundary(app: AsgiApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a route; whatever it raises becomes one problem body, and nothing of ours leaks into it."""
    try:
        await app(scope, receive, send)
    except ClientGone:
        return
    except TrainerError as error:
        await send_bytes(send, problem_body(error), status=error.status, media_type=PROBLEM_MEDIA_TYPE)
    except Exception:
        log.exception("gateway_error", path=scope["path"])
        failure = TrainerError("the gateway failed; its log says why")
        await send_bytes(send, problem_body(failure), status=500, media_type=PROBLEM_MEDIA_TYPE)


def problem_body(error: TrainerError) -> bytes:
    """RFC 9457's fields beside OpenAI's `error` object; the counts too where the context is full."""
    body = error.problem().model_dump()
    body["error"] = {
        "message": str(error),
        "type": "invalid_request_error" if error.status < 500 else "server_error",
        "param": error.where,
        "code": error.code,
    }
    if isinstance(error, ContextLengthExceeded):
        body["prompt_tokens"] = error.prompt_tokens
        body["max_tokens"] = error.max_tokens
        body["max_model_len"] = error.max_model_len
    return json.dumps(body).encode()


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


async def generate_while_connected(
    generation: Coroutine[Any, Any, Generation], receive: Receive
) -> Generation:
    """Wait for a generation; cancel it, which aborts the request, when the client leaves first.

    Raises:
        ClientGone: the client left.
    """
    task = asyncio.ensure_future(generation)
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


async def send_bytes(
    send: Send, body: bytes, *, status: int = 200, media_type: str = "application/json"
) -> None:
    headers = [(b"content-type", media_type.encode()), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def trainer_error_response(request: Request, error: Exception) -> Response:
    """Starlette's handler for the routes that are not the hot one."""
    assert isinstance(error, TrainerError)
    return Response(problem_body(error), status_code=error.status, media_type=PROBLEM_MEDIA_TYPE)


async def http_error_response(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, in the same shape."""
    assert isinstance(error, HTTPException)
    problem = Problem(
        title=error.detail,
        status=error.status_code,
        code="not_found" if error.status_code == 404 else "method_not_allowed",
        detail=f"{request.method} {request.url.path} is not served here",
        hint="Known: POST /v1/chat/completions, GET /v1/models, GET /health.",
    )
    message = {
        "message": problem.detail,
        "type": "invalid_request_error",
        "param": None,
        "code": problem.code,
    }
    body = json.dumps({**problem.model_dump(), "error": message})
    return Response(body, status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=error.headers)
