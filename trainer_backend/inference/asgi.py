"""Send replies and errors of the gateway in a form that the `openai` client can read."""

import json
from collections.abc import Sequence
from typing import Any

import structlog
from pydantic_core import PydanticSerializationError, to_json
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service_kit.errors import RouteError, ServiceError
from service_kit.problems import reply
from shared_schemas.chat import openai_error
from trainer_backend.errors import ContextLengthExceeded, TrainerError

log = structlog.get_logger(__name__)

_ROUTES = "Known: POST /v1/chat/completions, /v1/completions and /tokenize, GET /v1/models and /health."


class Outgoing:
    """An ASGI `Send` that remembers whether the reply has begun, because errors then cannot set a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._has_begun = False

    async def __call__(self, message: Message) -> None:
        self._has_begun = True
        await self._send(message)

    async def fail(self, error: ServiceError) -> None:
        """Send the error as the reply, or as the last event of a reply that has begun."""
        if self._has_begun:
            event = b"data: " + problem_body(error) + b"\n\n"
            await self._send({"type": "http.response.body", "body": event})
        else:
            response = error_response(error)
            await self._send(
                {"type": "http.response.start", "status": error.status, "headers": response.raw_headers}
            )
            await self._send({"type": "http.response.body", "body": response.body})


async def boundary(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run a route, and send every error as a problem body (RFC 9457) without internal details."""
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
    """Return an error as JSON that contains RFC 9457's fields and OpenAI's `error` object.

    The body of ContextLengthExceeded also contains its token counts.
    """
    body = error.problem().model_dump()
    body["error"] = openai_error(str(error), status=error.status, code=error.code, where=error.where)
    if isinstance(error, ContextLengthExceeded):
        body["prompt_tokens"] = error.prompt_tokens
        body["max_tokens"] = error.max_tokens
        body["max_model_len"] = error.max_model_len
    return json.dumps(body).encode()


Headers = Sequence[tuple[bytes, bytes]]


async def json_response(send: Send, body: dict[str, Any], headers: Headers = ()) -> None:
    data = _json_bytes(body)
    length = (b"content-length", str(len(data)).encode())
    headers = [(b"content-type", b"application/json"), length, *headers]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": data})


def _json_bytes(body: dict[str, Any]) -> bytes:
    """Return the body as JSON."""
    # Pydantic takes a quarter of the time of json.dumps, but refuses lone surrogates.
    try:
        return to_json(body, inf_nan_mode="constants")
    except PydanticSerializationError:
        return json.dumps(body, separators=(",", ":")).encode()


class EventStream:
    """A reply of server-sent events. Its status and headers are sent together with the first event."""

    def __init__(self, send: Send, headers: Headers = ()) -> None:
        self._send, self._headers = send, headers
        self._has_begun = False

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(_json_bytes(event))

    async def end(self) -> None:
        """Send `[DONE]`, the event after which `openai` clients stop reading, and end the reply."""
        await self._write(b"[DONE]")
        await self._send({"type": "http.response.body", "body": b""})

    async def _write(self, data: bytes) -> None:
        if not self._has_begun:
            self._has_begun = True
            head = ((b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache"))
            headers = [*head, *self._headers]
            await self._send({"type": "http.response.start", "status": 200, "headers": headers})
        body = b"data: " + data + b"\n\n"
        await self._send({"type": "http.response.body", "body": body, "more_body": True})


def error_response(error: ServiceError) -> Response:
    if isinstance(error, RouteError):
        error.hint = _ROUTES
    return reply(error, problem_body(error))
