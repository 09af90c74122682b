"""`Idempotency-Key` as ASGI middleware: a POST with a key is carried out once, answered as often as asked.

It stands inside the gate, so that only holders of a key reach it, and outside all that answers such a POST.
"""

import hashlib
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service_kit.errors import ServiceError
from service_kit.gate import given, whole_body
from service_kit.problems import problem_response
from task_app.errors import AnswerLost, CapacityReached, IdempotencyConflict, InvalidRequest, JournalFailed
from task_app.sessions.journal import WORK, Answer, Database, RawHeaders, Work

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
        database: keeps the answers.
    """

    def __init__(self, app: ASGIApp, *, database: Database) -> None:
        self._app = app
        self._database = database
        self._requests = database.requests

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
            earlier = await self._earlier(key, digest)
            if earlier is None:
                work = self._begin(key, digest, path=scope["path"])
        except ServiceError as error:
            await problem_response(error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        if earlier is not None:
            await _send(earlier, send, extra=(REPLAYED,))
        else:
            await self._carry_out(work, scope, given(body, receive), send)

    async def _earlier(self, key: str, digest: str) -> Answer | None:
        """The answer of this request if it came before, waited for if that is still carried out."""
        while (work := self._requests.get(key)) is not None:
            _check_same(work.digest, digest)
            if work.is_open:
                await work.settled.wait()
            else:
                self._database.write(work)
        stored = self._database.answer(key)
        if stored is None:
            return None
        _check_same(stored[0], digest)
        return stored[1] or _lost_answer("the task app was killed before it answered")

    def _begin(self, key: str, digest: str, *, path: str) -> Work:
        """A new key, whose request is carried out now; raises CapacityReached."""
        most = self._database.most
        if len(self._requests) >= most:
            raise CapacityReached(f"{most} requests with an Idempotency-Key are being carried out")
        work = Work(key, digest, survives=not path.startswith(OF_THIS_PROCESS))
        self._requests[key] = work
        return work

    async def _carry_out(self, work: Work, scope: Scope, receive: Receive, send: Send) -> None:
        recorder = _Recorder()
        token = WORK.set(work)
        try:
            await self._app(scope, receive, recorder)
        except BaseException:
            # How far it came is not known: to do it again would be the worse mistake.
            with suppress(JournalFailed):
                self._settle(work, _lost_answer("it failed inside the task app"))
            raise
        finally:
            WORK.reset(token)
        answer = recorder.answer()
        if answer.status in NOT_TAKEN and not work.has_effects:
            del self._requests[work.key]
            work.settled.set()
            await _send(answer, send)
            return
        kept_answer = answer
        if answer.status in NOT_TAKEN:
            kept_answer = _lost_answer(f"it was cut short with {answer.status}")
        elif answer.size > self._database.most_bytes:
            kept_answer = _lost_answer("its answer was too large to keep")
        try:
            self._settle(work, kept_answer)
        except JournalFailed as error:
            answer = _answer_of(error)
        await _send(answer, send)

    def _settle(self, work: Work, answer: Answer) -> None:
        """Keep the answer, and let those who wait for it go on; raises JournalFailed."""
        work.answer = answer
        work.settled.set()
        self._database.write(work)


class _Recorder:
    """A send channel that keeps the response: nothing leaves before it is remembered."""

    def __init__(self) -> None:
        self._status = 500
        self._headers: RawHeaders = ()
        self._body = bytearray()

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = tuple((bytes(name), bytes(value)) for name, value in message.get("headers", ()))
        elif message["type"] == "http.response.body":
            self._body += message.get("body", b"")

    def answer(self) -> Answer:
        return Answer(self._status, self._headers, bytes(self._body))


def request_digest(method: str, raw_path: bytes, query: bytes, body: bytes) -> str:
    """Of all that makes two requests the same; the lengths keep the parts apart."""
    parts = (method.encode(), raw_path, query, body)
    framed = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.blake2b(framed, digest_size=16).hexdigest()


def _key(found: list[bytes]) -> str:
    key = found[0].decode("latin-1").strip()
    if len(found) > 1 or not 0 < len(key) <= LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must be one header of 1 to {LONGEST_KEY} printable ASCII characters",
            where="header Idempotency-Key",
            hint="for example a UUID, made anew for every request that is not a retry",
        )
    return key


def _check_same(earlier: str, digest: str) -> None:
    if earlier != digest:
        raise IdempotencyConflict(
            "this Idempotency-Key came with another request before",
            where="header Idempotency-Key",
            hint="a new request needs a new key; a retry repeats method, path and body byte for byte",
        )


def _lost_answer(reason: str) -> Answer:
    """Answer a retry whose request may have been carried out, although its answer is lost."""
    return _answer_of(
        AnswerLost(
            f"the first request with this Idempotency-Key may have been carried out, but {reason}",
            where="header Idempotency-Key",
            hint="look at what it concerns before sending it again, then under a new key",
        )
    )


def _answer_of(error: ServiceError) -> Answer:
    response = problem_response(error)
    return Answer(response.status_code, tuple(response.raw_headers), bytes(response.body))


async def _send(answer: Answer, send: Send, *, extra: RawHeaders = ()) -> None:
    headers = [*answer.headers, *extra]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
