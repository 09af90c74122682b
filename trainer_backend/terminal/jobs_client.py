"""The HTTP client of a trainer service, for the terminal's commands."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from ssl import SSLContext
from typing import Any, NamedTuple

import httpx
from pydantic_core import from_json

from service_kit.keys import TRAINER_KEY, key_from_environ
from service_kit.replies import (
    Lines,
    ReplyFault,
    ReplyInvalid,
    bounded,
    plain_client,
    read_reply,
    redirect_target,
)
from shared_schemas.base import Count, StrictReply
from shared_schemas.json_text import read_typed
from shared_schemas.problem import Problem
from trainer_backend.errors import TrainerError

URL_VARIABLE = "TURNWISE_URL"
DEFAULT_URL = "http://127.0.0.1:8100"
_TIMEOUT_S = 30.0
# Maximum silence of an event stream, which sends something every 15 s.
_SILENCE_S = 60.0
# A page of jobs has about 100 kB, and a job's TOML at most the service's limit for bodies, 1 MiB by default.
_MOST_REPLY_BYTES = 32 << 20


class ServiceRefused(TrainerError, code="service_refused", status=400, title="The trainer service refused"):
    """The service refused a request; the message is the service's."""


class ServiceUnreachable(
    TrainerError, code="service_unreachable", status=502, title="The trainer service does not answer"
):
    """Nothing answers at the address, or the reply is not that of a trainer service."""


class _Progress(StrictReply):
    stage: str | None = None
    iteration: Count = 0
    iterations: Count | None = None


class JobReply(StrictReply):
    id: str
    name: str
    state: str
    started: str | None
    run_dir: str | None
    detail: str | None
    progress: _Progress | None


class JobsReply(StrictReply):
    jobs: list[JobReply]
    next_cursor: str | None


class CreatedReply(JobReply):
    warnings: list[str]


class ResolvedReply(StrictReply):
    toml: str
    warnings: list[str]


class _Line(StrictReply):
    time: str
    text: str


class LogReply(StrictReply):
    lines: list[_Line]


class _StateChange(StrictReply):
    state: str
    detail: str | None = None


class _Warning(StrictReply):
    detail: str


_EVENTS: dict[str, type[StrictReply]] = {
    "state": _StateChange,
    "end": _StateChange,
    "log": _Line,
    "store": _Warning,
}


class Event(NamedTuple):
    """An event of a stream. `identity` is its id, which `JobsClient.events` takes as `after`, or None."""

    name: str
    data: dict[str, Any]
    identity: str | None


@dataclass(frozen=True, slots=True)
class JobsClient:
    """An HTTP client of one trainer service.

    Raises (every method):
        ServiceRefused: the service refused the request.
        ServiceUnreachable: no trainer service answers, or a reply or a line of an event stream is longer than
            `most_reply_bytes`.
    """

    url: str
    environ: Mapping[str, str]
    most_reply_bytes: int = _MOST_REPLY_BYTES

    def get(self, path: str, kind: type[StrictReply] = StrictReply, **query: Any) -> Any:
        """Return a reply as plain JSON, after checking that it has at least the fields of `kind`."""
        return self._read(kind, self._ask("GET", path, params=query), path)

    def text(self, path: str) -> str:
        return self._ask("GET", path).decode(errors="replace")

    def post(
        self,
        path: str,
        kind: type[StrictReply] = StrictReply,
        *,
        body: str = "",
        headers: Mapping[str, str] | None = None,
        **query: Any,
    ) -> Any:
        return self._read(kind, self._ask("POST", path, params=query, content=body, headers=headers), path)

    def delete(self, path: str, **query: Any) -> None:
        self._ask("DELETE", path, params=query)

    def events(self, path: str, *, after: str | None = None) -> Iterator[Event]:
        """Yield the events after the event with the id `after`, until the service ends the stream."""
        query = {} if after is None else {"after": after}
        with self._answer(_SILENCE_S, "GET", path, params=query) as answer:
            name, identity = "", None
            for line in self._lines(answer):
                kind, _, value = line.partition(": ")
                if kind == "event":
                    name, identity = value, None
                elif kind == "id":
                    identity = value
                elif kind == "data":
                    data = self._read(_EVENTS.get(name, StrictReply), value.encode(), path)
                    yield Event(name, data, identity)

    def _ask(self, method: str, path: str, **options: Any) -> bytes:
        with self._answer(_TIMEOUT_S, method, path, **options) as answer:
            return self._content(answer)

    def _read(self, kind: type[StrictReply], content: bytes, path: str) -> Any:
        part = f"{self.url}{path} answers, and not as a trainer service does"
        try:
            read_reply(kind, content, part)
        except ReplyInvalid as error:
            raise ServiceUnreachable(str(error)) from error
        return from_json(content)

    @contextmanager
    def _answer(self, timeout_s: float, method: str, path: str, **options: Any) -> Iterator[httpx.Response]:
        """Send a request and yield its open response. Convert HTTP errors, even while the body is read."""
        key = key_from_environ(self.environ, TRAINER_KEY)
        keys = {"X-API-Key": key.get_secret_value()} if key is not None else {}
        client = plain_client(base_url=self.url, timeout=timeout_s, headers=keys, verify=_certificates())
        try:
            with client, client.stream(method, path, **options) as answer:
                if not answer.is_success:
                    raise self._refusal(answer)
                yield answer
        except (httpx.InvalidURL, httpx.UnsupportedProtocol) as error:
            raise ServiceRefused(f"--url is {self.url!r}, which is no http or https URL") from error
        except ReplyFault as error:
            raise ServiceUnreachable(
                f"{self.url} answers, and not as a trainer service does: {error}"
            ) from error
        except httpx.HTTPError as error:
            raise ServiceUnreachable(
                f"no trainer service answers at {self.url}: {error or type(error).__name__}",
                hint=f"Start one with `turnwise trainer`, or name another with --url or {URL_VARIABLE}.",
            ) from error

    def _content(self, answer: httpx.Response) -> bytes:
        return b"".join(bounded(answer.iter_raw(), self.most_reply_bytes))

    def _lines(self, answer: httpx.Response) -> Iterator[str]:
        lines = Lines(self.most_reply_bytes)
        for part in answer.iter_raw():
            for line in lines.take(part):
                yield line.rstrip(b"\r").decode(errors="replace")
        if lines.rest:
            yield lines.rest.decode(errors="replace")

    def _refusal(self, answer: httpx.Response) -> TrainerError:
        location = answer.headers.get("Location")
        if target := redirect_target(answer.status_code, location, str(answer.url)):
            return ServiceUnreachable(
                f"{answer.url} answered {answer.status_code}, and not as a trainer service does: it "
                f"redirects to {target}, and the key is sent to no other address",
                hint=f"Name the final address with --url or {URL_VARIABLE}.",
            )
        try:
            problem = read_typed(Problem.model_validate_json, self._content(answer))
        except ValueError:
            return ServiceUnreachable(
                f"{answer.url} answered {answer.status_code}, and not as a trainer service does"
            )
        hint = problem.hint
        if answer.status_code == 401:
            hint = f"Set {TRAINER_KEY} in the environment."
        return ServiceRefused(problem.detail, where=problem.where, hint=hint)


@cache
def _certificates() -> SSLContext:
    """Return a TLS context with the trusted certificates, cached because reading them takes 20 ms."""
    return httpx.create_ssl_context()


def client_for(url: str | None, environ: Mapping[str, str] = os.environ) -> JobsClient:
    """Return a client for the service at `url`, or else at TURNWISE_URL, or else on this machine."""
    return JobsClient((url or environ.get(URL_VARIABLE) or DEFAULT_URL).rstrip("/"), environ)
