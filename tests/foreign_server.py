"""Somebody else's OpenAI-compatible server: knows OpenAI's words alone, and counts nothing of ours."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from service_kit.server import Listener, ServerThread

# Loopback, but not on a task app's list of hosts unless somebody puts it there.
ELSEWHERE = "127.0.0.2"
KNOWN = {
    "model", "messages", "tools", "tool_choice", "temperature", "top_p", "max_tokens", "seed",
    "max_completion_tokens", "reasoning_effort",
}  # fmt: skip
ACTIONS = ("move_left", "do", "move_right", "do", "move_up", "do", "move_down", "sleep")

Answer = Callable[["ForeignServer", dict[str, Any]], Response]


@dataclass
class ForeignServer:
    """Answers with `first`, one a request, and with tool calls from then on.

    Attributes:
        key: the Bearer key that it wants; empty: none.
        url: its base URL, once it serves.
    """

    key: str = ""
    first: list[Answer] = field(default_factory=list)
    url: str = ""
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        self.headers.append(dict(request.headers))
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return error(401, f"Incorrect API key provided: {request.headers.get('authorization')}")
        unknown = sorted(body.keys() - KNOWN)
        if unknown:
            return error(400, f"Unrecognized request argument supplied: {unknown[0]}")
        return self.first.pop(0)(self, body) if self.first else self.call(body)

    def call(self, body: dict[str, Any], content: str | None = None) -> Response:
        """One action, which depends on nothing but the prompt."""
        name = ACTIONS[len(json.dumps(body["messages"])) % len(ACTIONS)]
        function = {"name": "interact_many", "arguments": json.dumps({"actions": [name]})}
        calls = [{"id": "call_abc", "type": "function", "function": function}]
        message = {"role": "assistant", "content": content, "tool_calls": calls}
        return self.say(body, message, finish_reason="tool_calls")

    def say(self, body: dict[str, Any], message: dict[str, Any], *, finish_reason: str = "stop") -> Response:
        choice = {"index": 0, "message": message, "finish_reason": finish_reason, "logprobs": None}
        return JSONResponse(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "model": f"{body['model']}-2026-01-01",
                "choices": [choice],
                "usage": {"prompt_tokens": 100, "completion_tokens": 7, "total_tokens": 107},
            }
        )


def error(status: int, message: str) -> Response:
    body = {"error": {"message": message, "type": "invalid_request_error", "code": None}}
    return JSONResponse(body, status_code=status)


def words(content: str | None) -> Answer:
    """An answer without a call."""
    return lambda server, body: server.say(body, {"role": "assistant", "content": content})


def nonsense(server: ForeignServer, body: dict[str, Any]) -> Response:
    return Response("<html>hello</html>", media_type="text/html")


def repeats_the_key(server: ForeignServer, body: dict[str, Any]) -> Response:
    return server.call(body, content=f"You sent me {server.headers[-1]['authorization']}.")


@contextmanager
def foreign_server(*first: Answer, key: str = "", host: str = ELSEWHERE) -> Iterator[ForeignServer]:
    """On a real port, by uvicorn, on a thread of its own."""
    server = ForeignServer(key=key, first=list(first))
    app = Starlette(routes=[Route("/v1/chat/completions", server.chat, methods=["POST"])])
    with ServerThread(app, Listener(host, 0)) as server.url:
        yield server
