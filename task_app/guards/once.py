"""`Idempotency-Key` as ASGI middleware: a POST with a key is carried out once, answered as often as asked.

It stands inside the gate, so that only holders of a key reach it, and outside all that answers such a POST.
"""

from collections.abc import Callable
from contextlib import suppress

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from task_app.errors import AnswerLost, InvalidRequest, JournalFailed, TaskAppError
from task_app.guards.content import given, whole_body
from task_app.guards.idempotency import CLAIM, Answer, Answers, Claim, RawHeaders, request_digest
from task_app.routes.problems import problem_response

HEADER = b"idempotency-key"
LONGEST_KEY = 200
REPLAYED = (b"idempotency-replayed", b"true")
# The request was not carried out, and may well be the next time: nothing to remember.
NOT_TAKEN = frozenset({408, 413, 428, 429, 502, 503, 504, 507})
# Their answers speak of what this process holds, and are not kept for the next one: retries do no harm there.
OF_THIS_PROCESS = ("/rollouts", "/run/")


class Once:
    """Wraps the app; a request without the header passes as it is.

    Args:
        app: what carries requests out.
        answers: what was answered of late.
        write: makes an answer survive the process; None where answers need not.
    """

    def __init__(self, app: ASGIApp, *, answers: Answers, write: Callable[[Claim], None] | None) -> None:
        self._app = app
        self._answers = answers
        self._write = write

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        found = [value for name, value in scope["headers"] if name == HEADER]
        if not found:
            await self._app(scope, receive, send)
            return
        try:
            key, body = _key(found), await whole_body(receive)
            digest = request_digest(scope["method"], scope["raw_path"], scope["query_string"], body)
            claim, is_new = await self._claim(key, digest, path=scope["path"])
        except TaskAppError as error:
            await problem_response(error)(scope, receive, send)
            return
        if is_new:
            await self._carry_out(claim, scope, given(body, receive), send)
        else:
            assert claim.answer is not None, "only what is answered is told again"
            await self._tell(claim, claim.answer, send, extra=(REPLAYED,))

    async def _claim(self, key: str, digest: str, *, path: str) -> tuple[Claim, bool]:
        """The claim of this request, and whether it is to be carried out now; waits for one under way."""
        while (claim := self._answers.find(key, digest)) is not None:
            if claim.answer is not None:
                return claim, False
            await claim.settled.wait()
        claim = self._answers.take(key, digest)
        claim.written = self._write is None or path.startswith(OF_THIS_PROCESS)
        return claim, True

    async def _carry_out(self, claim: Claim, scope: Scope, receive: Receive, send: Send) -> None:
        kept = _Kept()
        token = CLAIM.set(claim)
        try:
            await self._app(scope, receive, kept)
        except BaseException:
            # How far it came is not known: to do it again would be the worse mistake.
            self._answers.settle(claim, lost_answer("it failed inside the task app"))
            with suppress(JournalFailed):
                self._make_durable(claim)
            raise
        finally:
            CLAIM.reset(token)
        answer = kept.answer()
        if answer.status in NOT_TAKEN and not claim.touched:
            self._answers.release(claim)
            await _send(answer, send)
            return
        kept_answer = answer
        if answer.status in NOT_TAKEN:
            kept_answer = lost_answer(f"it was cut short with {answer.status}")
        elif answer.size > self._answers.most_bytes:
            kept_answer = lost_answer("its answer was too large to keep")
        self._answers.settle(claim, kept_answer)
        await self._tell(claim, answer, send)

    async def _tell(self, claim: Claim, answer: Answer, send: Send, *, extra: RawHeaders = ()) -> None:
        """Send the answer, once that of the claim is written where it has to be."""
        try:
            self._make_durable(claim)
        except JournalFailed as error:
            answer, extra = answer_of(error), ()
        await _send(answer, send, extra=extra)

    def _make_durable(self, claim: Claim) -> None:
        if self._write is not None and not claim.written:
            self._write(claim)


class _Kept:
    """A send channel that keeps the response: nothing leaves before it is remembered."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: tuple[tuple[bytes, bytes], ...] = ()
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def answer(self) -> Answer:
        return Answer(self._status, self._headers, bytes(self._body))


def _key(found: list[bytes]) -> str:
    key = found[0].decode("latin-1").strip()
    if len(found) > 1 or not 0 < len(key) <= LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must be one header of 1 to {LONGEST_KEY} printable ASCII characters",
            where="header Idempotency-Key",
            hint="for example a UUID, made anew for every request that is not a retry",
        )
    return key


def lost_answer(reason: str) -> Answer:
    """What a retry is told when its request may have been carried out, but the answer is not there."""
    return answer_of(
        AnswerLost(
            f"the first request with this Idempotency-Key may have been carried out, but {reason}",
            where="header Idempotency-Key",
            hint="look at what it concerns before sending it again, then under a new key",
        )
    )


def answer_of(error: TaskAppError) -> Answer:
    response = problem_response(error)
    return Answer(response.status_code, tuple(response.raw_headers), bytes(response.body))


async def _send(answer: Answer, send: Send, *, extra: RawHeaders = ()) -> None:
    headers = [*answer.headers, *extra]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
