"""Calls from one process to another: a table of them, carried as lines over HTTP or over a socket.

    CALLS = Table(
        {"update": Call(tuple[list[Episode], int], Metrics, progress=tuple[int, int])},
        errors=TrainerError, failure=LearnerFailed,
    )

    POST /calls/{name}    the arguments; the reply is a stream of lines: `progress [3, 10]`, any number of
                          times, and then one `result [...]` or `error {...}`

`service_kit/socket_calls.py` carries the same lines over a socket.

Numbers cross bit for bit, NaN and infinity too, but of pydantic models, whose own config says how. An error
arrives as its own class, or as the nearest one that the reader knows. What either side reads is bounded and
fits the type of the table; anything else is a `failure` that names call, field and value.
"""

import asyncio
import os
import reprlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Generic, TypeVar

import structlog
from pydantic import ConfigDict, Field, JsonValue, TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import BaseRoute, Route

from service_kit.boundary import describe_error
from service_kit.errors import BodyTooLarge, RouteError, ServiceError
from service_kit.gate import Gate, KeyDoor, whole_body
from service_kit.keys import Keys
from service_kit.problems import install_problem_handlers
from service_kit.replies import Lines, ReplyTooLarge, redirect_target
from shared_schemas.base import FIRST_ERROR_ONLY, Body
from shared_schemas.json_text import read_typed
from shared_schemas.plain_text import encodable
from shared_schemas.problem import Problem

log = structlog.get_logger("calls")

Error = TypeVar("Error", bound=ServiceError)
Tell = Callable[..., None]
PATH = "/calls/"

_MIB = 1 << 20
# A reply that refuses a call, instead of answering it: a problem.
MOST_REFUSAL_BYTES = _MIB
_MOST_WAITING_LINES = 10_000
_SHOWN = 60
_MOST_BODY_S = 600.0


class Call:
    """How the arguments, the progress and the result of a call are written and read.

    Args:
        arguments, progress: types, as a tuple; without a type of progress the call reports none.
        result: a type.
        most_argument_bytes: the longest body of the arguments.
        most_reply_bytes: the longest line of the reply,
        reply_growth: and how much longer it may be for each byte of the arguments.
        encode, decode: of the arguments, where they are more than a line of JSON.
    """

    def __init__(
        self,
        arguments: Any,
        result: Any,
        *,
        progress: Any = None,
        most_argument_bytes: int = 16 * _MIB,
        most_reply_bytes: int = _MIB,
        reply_growth: int = 0,
        encode: Callable[[TypeAdapter[Any], Any], bytes] = TypeAdapter.dump_json,
        decode: Callable[[TypeAdapter[Any], bytes], Any] = lambda adapter, body: read_typed(
            adapter.validate_json, body
        ),
    ) -> None:
        # A text is no number; pydantic models are as strict as their own config says.
        config = ConfigDict(ser_json_inf_nan="constants", strict=True)

        def adapt(kind: Any) -> TypeAdapter[Any]:
            return TypeAdapter(Annotated[kind, FIRST_ERROR_ONLY], config=config)

        self.arguments, self.result = adapt(arguments), adapt(tuple[result])
        self.progress = None if progress is None else adapt(progress)
        self.most_argument_bytes, self.most_reply_bytes = most_argument_bytes, most_reply_bytes
        self.reply_growth = reply_growth
        self.encode, self.decode = encode, decode


class ErrorBody(Body):
    """An error as it crosses from one process to another."""

    classes: tuple[str, ...]
    """Names of its class and those above it, the nearest first."""
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
    errno: int | None = None
    """The errno of the system's error behind it, which says whether another attempt may help."""
    more: dict[str, JsonValue] = Field(default_factory=dict)
    """Its further attributes, by `ServiceError.carries`."""

    @classmethod
    def of(cls, error: ServiceError) -> "ErrorBody":
        return cls(
            classes=tuple(kind.__name__ for kind in type(error).__mro__ if issubclass(kind, ServiceError)),
            code=error.code,
            detail=encodable(error.detail),
            where=error.where and encodable(error.where),
            hint=error.hint,
            errno=error.__cause__.errno if isinstance(error.__cause__, OSError) else None,
            more={
                name: TypeAdapter(kind).dump_python(getattr(error, name), mode="json")
                for name, kind in error.carries.items()
            },
        )

    def error(self, errors: type[Error], failure: type[Error]) -> Error:
        """The same error, of the nearest class below `errors`; of `failure` where it has none of these.

        Raises:
            ValidationError: an attribute does not fit its type.
        """
        known = {kind.__name__: kind for kind in errors.tree()}
        kind = next((known[name] for name in self.classes if name in known), failure)
        error = kind.__new__(kind)  # some have arguments of their own
        ServiceError.__init__(error, self.detail, where=self.where, hint=self.hint, code=self.code)
        for name in error.carries.keys() & self.more.keys():
            setattr(error, name, TypeAdapter(error.carries[name]).validate_python(self.more[name]))
        if self.errno is not None:
            error.__cause__ = OSError(self.errno, os.strerror(self.errno))
        return error


class Table(dict[str, Call], Generic[Error]):
    """Calls by name.

    Args:
        errors: the tree of the errors that they raise.
        failure: the class of those that are of no known class, and of what does not fit this table.
    """

    def __init__(self, calls: Mapping[str, Call], *, errors: type[Error], failure: type[Error]) -> None:
        super().__init__(calls)
        self._errors, self.failure = errors, failure
        self.most_argument_bytes = max(call.most_argument_bytes for call in calls.values())
        self.most_reply_bytes = max(call.most_reply_bytes for call in calls.values())

    def write_arguments(self, name: str, arguments: Sequence[Any]) -> bytes:
        call = self[name]
        return call.encode(call.arguments, tuple(arguments))

    def read_arguments(self, name: str, body: bytes, tell: Tell | None = None) -> tuple[Any, ...]:
        """The arguments of a call, then `tell` if it has progress; a `failure` where they do not fit."""
        call = self[name]
        try:
            arguments: tuple[Any, ...] = call.decode(call.arguments, body)
        except ValueError as error:
            raise self.misfit(f"the list of arguments of {name!r}", error) from error
        return arguments if tell is None or call.progress is None else (*arguments, tell)

    def write_progress(self, name: str, values: tuple[Any, ...]) -> bytes:
        progress = self[name].progress
        assert progress is not None, "it declares none"
        return b"progress " + progress.dump_json(values)

    def write_result(self, name: str, result: Any) -> bytes:
        return b"result " + self[name].result.dump_json((result,))

    def write_error(self, error: Exception, name: str) -> bytes:
        """The line of an error; an error of no service becomes a `failure`."""
        if not isinstance(error, ServiceError):
            log.error("call_failed", call=name, exc_info=error)
            error = self.failure(f"{name!r} met {describe_error(error)}")
        return b"error " + ErrorBody.of(error).model_dump_json().encode()

    def read_error(self, body: bytes, name: str) -> Error:
        try:
            return read_typed(ErrorBody.model_validate_json, body).error(self._errors, self.failure)
        except ValueError as error:
            raise self.misfit(f"the error of {name!r}", error) from error

    def misfit(self, whole: str, error: ValueError, outer: int = 0) -> Error:
        """The error for a value of a wrong type: its place, what is allowed, and what was found."""
        fault = f": {error}"  # of bytes that are no array
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"][outer:]))
            at = f" at {field}" if field else ""
            fault = f"{at}: {first['msg']}; there is {_show(first['input'])}"
        return self.failure(f"{whole} does not fit its type{fault}")

    def refusal(self, url: str, status: int, location: str | None, body: bytes) -> Error:
        """The error of a reply over HTTP that does not answer the call; of its class where it names one."""
        if target := redirect_target(status, location, url):
            return self.failure(
                f"{url} redirects to {target}, and the key is sent to no other address",
                hint="The launcher must know the process's final address.",
            )
        try:
            problem = read_typed(Problem.model_validate_json, body)
        except ValueError:
            return self.failure(f"{url} answered {status}, and not as a process of a run does")
        kind = next((kind for kind in self._errors.tree() if kind.code == problem.code), self.failure)
        error = kind.__new__(kind)
        ServiceError.__init__(error, problem.detail, where=problem.where, hint=problem.hint)
        return error


class Reply:
    """The reply of a call as it comes, over whatever.

    `body` are the arguments as they were sent. `tell` receives the progress. What it raises is kept in
    `unwelcome`: the call is to be stopped, and that error is its end.
    """

    def __init__(self, table: Table[Any], name: str, body: bytes = b"", tell: Tell | None = None) -> None:
        self.name, self.body, self._table, self._tell = name, body, table, tell
        self._call = table[name]
        self._lines = Lines(self._call.most_reply_bytes + self._call.reply_growth * len(body))
        self._end: bytes | None = None
        self.unwelcome: Exception | None = None

    def again(self) -> "Reply":
        """A reader for the same call, which is repeated after this reply was cut off."""
        reply = Reply(self._table, self.name, self.body, self._tell)
        reply.unwelcome = self.unwelcome
        return reply

    def take(self, part: bytes) -> bool:
        """Read a part of the reply; return whether that has ended."""
        try:
            lines = self._lines.take(part)
        except ReplyTooLarge as error:
            raise self._table.failure(f"the reply to {self.name!r}: {error}") from error
        return any([self.hear(line) for line in lines])

    def hear(self, line: bytes) -> bool:
        """Read a line; return whether the reply has ended with it."""
        kind, _, text = line.partition(b" ")
        if kind == b"progress" and self._call.progress is not None and self._end is None:
            try:
                values = read_typed(self._call.progress.validate_json, text)
            except ValueError as error:
                raise self._table.misfit(f"the progress of {self.name!r}", error) from error
            if self._tell is not None and self.unwelcome is None:
                try:
                    self._tell(*values)
                except Exception as error:
                    self.unwelcome = error
            return False
        if kind not in (b"result", b"error") or self._end is not None:
            words = _show(line)
            raise self._table.failure(f"the reply to {self.name!r} does not fit: it has the line {words}")
        self._end = line
        return True

    def result(self) -> Any:
        """The result of a reply that has ended; or its error is raised."""
        if self.unwelcome is not None:
            raise self.unwelcome
        assert self._end is not None, "the reply has ended"
        kind, _, text = self._end.partition(b" ")
        if kind == b"error":
            raise self._table.read_error(text, self.name)
        try:
            return read_typed(self._call.result.validate_json, text)[0]
        except ValueError as error:
            raise self._table.misfit(f"the result of {self.name!r}", error, outer=1) from error


async def carry_out(
    table: Table[Any], host: object, name: str, body: bytes, say: Callable[[bytes], None]
) -> None:
    """Do a call, and say the lines of its reply.

    Args:
        host: has a coroutine method for each call. It is given the arguments, and where the call has progress
            what tells that.
    """

    def tell(*values: Any) -> None:
        say(table.write_progress(name, values))

    try:
        arguments = table.read_arguments(name, body, tell)
        line = table.write_result(name, await getattr(host, name)(*arguments))
    except asyncio.CancelledError:
        say(table.write_error(table.failure(f"{name!r} was stopped"), name))
        raise
    except Exception as error:  # whatever it is, the caller must hear of it
        line = table.write_error(error, name)
    say(line)


async def reply_lines(table: Table[Any], host: object, name: str, body: bytes) -> AsyncIterator[bytes]:
    """Do a call while its reply is read; it is cancelled where the reader goes, or does not read."""
    lines: asyncio.Queue[bytes] = asyncio.Queue()

    def say(line: bytes) -> None:
        if line.startswith(b"progress") and lines.qsize() >= _MOST_WAITING_LINES:
            raise table.failure(f"the caller of {name!r} does not read its progress")
        lines.put_nowait(line)

    work = asyncio.ensure_future(carry_out(table, host, name, body, say))
    try:
        while True:
            line = await lines.get()
            yield line + b"\n"
            if not line.startswith(b"progress"):
                return
    finally:
        work.cancel()


# Begins a call that was posted, and yields the lines of its reply.
Begin = Callable[[Request, str, bytes], AsyncIterator[bytes]]


def calls_app(table: Table[Any], begin: Begin, keys: Keys, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the ASGI app of a process whose calls are posted; `routes` are further ones under its key."""

    async def call(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in table:
            detail = f"there is no call {name!r:.80}; known: {', '.join(table)}"
            raise RouteError(HTTPStatus.NOT_FOUND, detail, where="path")
        body = await whole_body(request.receive)
        if len(body) > (most := table[name].most_argument_bytes):
            raise BodyTooLarge(f"the arguments of {name!r} have more than {most} bytes", where="body")
        return StreamingResponse(begin(request, name, body), media_type="text/plain")

    gate = Middleware(
        Gate,
        door=KeyDoor(keys, open_paths=()),
        max_body_bytes=table.most_argument_bytes,
        max_body_s=_MOST_BODY_S,
        unreadable=None,  # each call reads its own arguments
    )
    app = Starlette(routes=[Route(PATH + "{name}", call, methods=["POST"]), *routes], middleware=[gate])
    install_problem_handlers(app)
    return app


def _show(value: Any) -> str:
    """A value that may be large, for a sentence."""
    start = value[:_SHOWN] if isinstance(value, str | bytes) else value
    return f"{reprlib.repr(start)} ({type(value).__name__})"
