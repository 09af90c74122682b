"""ASGI middleware that rewrites errors of a capture's model API (/v1) as OpenAI's or Anthropic's errors.

Errors that occur before a route runs are rewritten too: a wrong key, too large a body, an unknown route.
"""

import json
from collections.abc import Callable, Mapping
from typing import Any

from starlette.datastructures import MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared_schemas.problem import PROBLEM_MEDIA_TYPE
from task_app.captures.calls import Dialect
from task_app.captures.door import PATH, V1
from task_app.errors import UnknownName

CLIENT_MISTAKE = 400


def split_path(scope: Scope) -> tuple[str, str]:
    """Return the capture's id and the part after /v1/ of a model call's path; ("", "") for other paths."""
    path = scope.get("path", "")
    if not path.startswith(PATH):
        return "", ""
    capture_id, slash, rest = path.removeprefix(PATH).partition(V1)
    return (capture_id, rest) if slash else ("", "")


class CallErrors:
    """Middleware that translates problem+json replies to requests below a capture's /v1.

    `find_dialect` returns the dialect (OpenAI's or Anthropic's) for the path after /v1/ and the headers.
    """

    def __init__(self, app: ASGIApp, find_dialect: Callable[[str, Mapping[bytes, bytes]], Dialect]) -> None:
        self._app, self._find_dialect = app, find_dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        capture_id, path = split_path(scope) if scope["type"] == "http" else ("", "")
        if capture_id or path:
            send = _Translation(self._find_dialect(path, dict(scope["headers"])), send)
        await self._app(scope, receive, send)


class _Translation:
    """Wraps ASGI's `send`: translates problem+json replies, and sends other replies unchanged."""

    def __init__(self, dialect: Dialect, send: Send) -> None:
        self._dialect, self._send = dialect, send
        self._start: Message | None = None
        self._body = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start" and dict(message["headers"]).get(
            b"content-type", b""
        ).startswith(PROBLEM_MEDIA_TYPE.encode()):
            self._start = message
        elif self._start is None:
            await self._send(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                await self._send_translated(self._start, json.loads(self._body))

    async def _send_translated(self, start: Message, problem: Mapping[str, Any]) -> None:
        """Send the problem in the dialect's form.

        Status 409 and 422 become 400, because client libraries do not retry a 400.
        """
        is_name = problem["code"] == UnknownName.code
        code = "model_not_found" if is_name else problem["code"]
        status = 404 if is_name else CLIENT_MISTAKE if start["status"] in (409, 422) else start["status"]
        where, hint = problem.get("where"), problem.get("hint")
        place = f"{where}: " if where and not problem["detail"].startswith(where) else ""
        sentence = f"{place}{problem['detail']}" + (f" ({hint})" if hint else "")
        body = json.dumps(self._dialect.error(status, code, sentence, where)).encode()
        headers = MutableHeaders(raw=list(start["headers"]))
        headers["Content-Type"], headers["Content-Length"] = "application/json", str(len(body))
        await self._send({**start, "status": status, "headers": headers.raw})
        await self._send({"type": "http.response.body", "body": body})
