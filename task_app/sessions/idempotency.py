"""ASGI middleware for the header `Idempotency-Key`: a POST is carried out once, and retries get its answer.

The middleware runs after the gate, which refuses clients without an API key, and before the routes.
"""

import hashlib
from contextlib import suppress

from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service_kit.errors import ServiceError
from service_kit.gate import receive_with_body, whole_body
from service_kit.problems import problem_response
from task_app.errors import AnswerLost, CapacityReached, IdempotencyConflict, InvalidRequest, JournalFailed
from task_app.sessions.journal import WORK, Answer, Database, RawHeaders, Work

HEADER = b"idempotency-key"
LONGEST_KEY = 200
REPLAY_HEADER = (b"idempotency-replayed", b"true")
# Requests that are answered with these statuses were not carried out and may succeed later, so the answers
# are not stored. 499: the client disconnected, which cancelled the work.
REJECTIONS = frozenset({408, 413, 428, 429, 499, 502, 503, 504, 507})
# The effects of requests to these paths end with the process, so the next process deletes their answers: it
# may carry out a retry again.
OF_THIS_PROCESS = ("/rollouts", "/run/")


class Once:
    """Middleware that carries out a POST once per key; requests without the header pass unchanged."""

    def __init__(self, app: ASGIApp, *, database: Database) -> None:
        self._app = app
        self._database = database
        self._requests = database.requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_post = scope["type"] == "http" and scope["method"] == "POST"
        headers = [value for name, value in scope["headers"] if name == HEADER] if is_post else []
        if not headers:
            await self._app(scope, receive, send)
            return
        try:
            key, body = _read_key(headers), await whole_body(receive)
            digest = request_digest(scope["method"], scope["raw_path"], scope["query_string"], body)
            earlier = await self._find_answer(key, digest)
            if earlier is None:
                work = self._register_work(key, digest, path=scope["path"])
        except ServiceError as error:
            await problem_response(error)(scope, receive, send)
            return
        except ClientDisconnect:
            return
        if earlier is not None:
            await _send_answer(earlier, send, extra=(REPLAY_HEADER,))
        else:
            await self._carry_out(work, scope, receive_with_body(body, receive), send)

    async def _find_answer(self, key: str, digest: str) -> Answer | None:
        """Return the answer to an earlier request with this key, or None if there was none.

        If the earlier request is still being carried out, wait until it is answered.

        Raises:
            IdempotencyConflict: the earlier request was a different one.
            JournalFailed: the database could not be read or written.
        """
        while (work := self._requests.get(key)) is not None:
            _check_same(work.digest, digest)
            if work.is_open:
                await work.done_event.wait()
            else:
                self._database.write(work)
        row = self._database.answer(key)
        if row is None:
            return None
        _check_same(row[0], digest)
        return row[1] or _report_lost("the task app was killed before it answered")

    def _register_work(self, key: str, digest: str, *, path: str) -> Work:
        """Register the key of a new request; raise CapacityReached if too many keys are registered."""
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
            # Some effects of the request may exist already. A retry is refused, because carrying the request
            # out twice would be worse.
            with suppress(JournalFailed):
                self._store_answer(work, _report_lost("it failed inside the task app"))
            raise
        finally:
            WORK.reset(token)
        answer = recorder.answer()
        if answer.status in REJECTIONS and not work.has_effects:
            del self._requests[work.key]
            work.done_event.set()
            await _send_answer(answer, send)
            return
        answer_to_keep = answer
        if answer.status in REJECTIONS:
            answer_to_keep = _report_lost(f"it was cut short with {answer.status}")
        elif answer.size > self._database.most_bytes:
            answer_to_keep = _report_lost("its answer was too large to keep")
        try:
            self._store_answer(work, answer_to_keep)
        except JournalFailed as error:
            answer = _make_answer(error)
        await _send_answer(answer, send)

    def _store_answer(self, work: Work, answer: Answer) -> None:
        """Store the answer, and wake the retries that wait for it. Raises JournalFailed if storing fails."""
        work.answer = answer
        work.done_event.set()
        self._database.write(work)


class _Recorder:
    """Replaces ASGI's `send` and collects the response, so that it is stored before it is sent."""

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
    """Return a digest of the request; two requests are equal if their digests are equal."""
    # Each part follows its length, so that no two requests give the same bytes.
    parts = (method.encode(), raw_path, query, body)
    data = b"".join(len(part).to_bytes(8, "big") + part for part in parts)
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _read_key(headers: list[bytes]) -> str:
    key = headers[0].decode("latin-1").strip()
    if len(headers) > 1 or not 0 < len(key) <= LONGEST_KEY or not (key.isascii() and key.isprintable()):
        raise InvalidRequest(
            f"Idempotency-Key must be one header of 1 to {LONGEST_KEY} printable ASCII characters",
            where="header Idempotency-Key",
            hint="for example a new UUID for every request; only a retry repeats it",
        )
    return key


def _check_same(earlier: str, digest: str) -> None:
    if earlier != digest:
        raise IdempotencyConflict(
            "this Idempotency-Key came with another request before",
            where="header Idempotency-Key",
            hint="a new request needs a new key; a retry repeats method, path and body byte for byte",
        )


def _report_lost(reason: str) -> Answer:
    """Return the error with which a retry is answered if the answer to the first request is lost."""
    return _make_answer(
        AnswerLost(
            f"the first request with this Idempotency-Key may have been carried out, but {reason}",
            where="header Idempotency-Key",
            hint="look at what it concerns before sending it again, then under a new key",
        )
    )


def _make_answer(error: ServiceError) -> Answer:
    response = problem_response(error)
    return Answer(response.status_code, tuple(response.raw_headers), bytes(response.body))


async def _send_answer(answer: Answer, send: Send, *, extra: RawHeaders = ()) -> None:
    headers = [*answer.headers, *extra]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": answer.body, "more_body": False})
