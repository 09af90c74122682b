"""The latest moment of an answer, as ASGI middleware: what takes longer is told so, and goes on by itself.

Work is not cut off in the middle: a session is held until its step is whole, and a retry with the same
Idempotency-Key gets the answer. What may take longer on purpose has a bound of its own (`LONG`).
"""

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from task_app.errors import RequestDeadline
from task_app.routes.problems import problem_response

# Whole rollouts and long polls answer when they have something, within bounds that their requests name.
LONG = frozenset({"/rollout", "/rollouts"})


class Deadline:
    """Wraps the app: 504 when no answer has begun `at_most_s` after the request did."""

    def __init__(self, app: ASGIApp, *, at_most_s: float) -> None:
        self._app = app
        self._at_most_s = at_most_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in LONG:
            await self._app(scope, receive, send)
            return
        answer = _Answer(scope, receive, send, self._at_most_s)
        # A timer and no task: it costs a request next to nothing.
        timer = asyncio.get_running_loop().call_later(self._at_most_s, answer.give_up)
        try:
            await self._app(scope, receive, answer.send)
        finally:
            timer.cancel()


class _Answer:
    """The send channel of a request: either what the app says, or that it was too late."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, at_most_s: float) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self._at_most_s = at_most_s
        self._begun = False
        self._given_up: asyncio.Task[None] | None = None

    async def send(self, message: Message) -> None:
        self._begun = True
        if self._given_up is None:
            await self._send(message)

    def give_up(self) -> None:
        if self._begun:
            return
        error = RequestDeadline(
            f"no answer within {self._at_most_s:g} s; the request may still be carried out",
            where=self._scope["path"],
            hint="a retry with the same Idempotency-Key waits for it and gets its answer",
        )
        reply = problem_response(error)(self._scope, self._receive, self._send)
        self._given_up = asyncio.get_running_loop().create_task(reply)
