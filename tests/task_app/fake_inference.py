"""An inference server on a real port that answers what a test says, and keeps what it was asked."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

Answer = Callable[[dict[str, Any]], web.StreamResponse]


@dataclass
class FakeInference:
    url: str = ""
    answers: list[Answer] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    silent: bool = False

    def asked_by(self, **config: Any) -> dict[str, Any]:
        """The config of a policy that asks it, in the body of a request."""
        return {"config": {"inference_url": self.url, "model": "m", **config}}

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(await request.json())
        self.headers.append({name.lower(): value for name, value in request.headers.items()})
        self.paths.append(request.path_qs)
        if self.silent:
            await asyncio.Event().wait()
        answer = self.answers[min(len(self.bodies), len(self.answers)) - 1]
        return answer(self.bodies[-1])


@asynccontextmanager
async def fake_inference(*answers: Answer, silent: bool = False) -> AsyncIterator[FakeInference]:
    """Answers in order, the last one for ever; a silent one never does."""
    fake = FakeInference(answers=list(answers), silent=silent)
    app = web.Application(client_max_size=1 << 24)
    app.router.add_route("*", "/{path:.*}", fake.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    fake.url = f"http://{host}:{port}"
    try:
        yield fake
    finally:
        await runner.cleanup()


def completion(message: dict[str, Any], *, reply: Any = None, choice: Any = None) -> Answer:
    """A chat completion with this message, and with what else a test puts at its two levels."""
    body = {
        "id": "x",
        "object": "chat.completion",
        "model": "job/actor",
        "choices": [{"index": 0, "message": message, "finish_reason": "stop", **(choice or {})}],
        "usage": {"prompt_tokens": 4, "completion_tokens": 2},
        **(reply or {}),
    }
    return lambda asked: web.json_response(body)


def says(text: str) -> Answer:
    return completion({"role": "assistant", "content": text})


def calling(*names: str, reply: Any = None, choice: Any = None) -> Answer:
    """The model calls `add` with these names."""
    function = {"name": "add", "arguments": json.dumps({"names": list(names)})}
    call = {"id": "call_7", "type": "function", "function": function}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    return completion(message, reply=reply, choice=choice)


def tokens(prompt: list[int], reused: int, sampled: list[int]) -> dict[str, Any]:
    """Keyword arguments of `calling` or `completion`: our gateway's additions."""
    return {
        "reply": {"prompt_token_ids": prompt, "prompt_ids_reused": reused},
        "choice": {
            "token_ids": sampled,
            "token_logprobs": [-0.5] * len(sampled),
            "versions": [[0, 3]],
            "sampling_finish_reason": "length",
        },
    }


def status(code: int, body: Any) -> Answer:
    return lambda asked: web.json_response(body, status=code)


def raw(text: str) -> Answer:
    return lambda asked: web.Response(text=text, content_type="application/json")
