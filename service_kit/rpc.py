"""Remote calls between processes: a table declares the calls; HTTP or a socket carries them as lines.

    CALLS = Table(
        {"update": Call(tuple[list[Episode], int], Metrics, progress=tuple[int, int])},
        errors=TrainerError, failure=LearnerFailed,
    )

    POST /calls/{name}    The body has the arguments. The reply is a stream of lines: any number of
                          `progress [3, 10]`, then one `result [...]` or `error {...}`.

`service_kit/socket_calls.py` carries the same lines over a socket.

Numbers are transferred exactly, including NaN and infinity; pydantic models follow their own config. An error
keeps its class, or gets the nearest base class that the reader knows. Both sides limit the size of what they
read and check its type; data that does not fit raises `failure`, which names call, field and value.
"""

import asyncio
import os
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
from service_kit.replies import Lines, ReplyTooLarge, redirect_target, show_found
from shared_schemas.base import FIRST_ERROR_ONLY, Body
from shared_schemas.json_text import read_typed
from shared_schemas.plain_text import encodable
from shared_schemas.problem import Problem

log = structlog.get_logger("calls")

Error = TypeVar("Error", bound=ServiceError)
Tell = Callable[..., None]
PATH = "/calls/"

_MIB = 1 << 20
# Largest problem body of a reply that refuses a call.
MOST_REFUSAL_BYTES = _MIB
_MOST_WAITING_LINES = 10_000
_MOST_BODY_S = 600.0


class Call:
    """The types, encoding and limits of a call.

    Args:
        arguments: type of the tuple of arguments.
        progress: type of the tuple that is reported as progress; None if the call reports none.
        most_argument_bytes: largest body of the arguments.
        most_reply_bytes: longest line of the reply.
        reply_growth: bytes by which a line may be longer for each byte of the arguments.
        encode, decode: convert the arguments; JSON by default.
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
        # Strict: a string is not read as a number. pydantic models follow their own config.
        config = ConfigDict(ser_json_inf_nan="constants", strict=True)

        def adapt(kind: Any) -> TypeAdapter[Any]:
            return TypeAdapter(Annotated[kind, FIRST_ERROR_ONLY], config=config)

        self.arguments, self.result = adapt(arguments), adapt(tuple[result])
        self.progress = None if progress is None else adapt(progress)
        self.most_argument_bytes, self.most_reply_bytes = most_argument_bytes, most_reply_bytes
        self.reply_growth = reply_growth
        self.encode, self.decode = encode, decode


class ErrorBody(Body):
    """An error in JSON."""

    classes: tuple[str, ...]
    """Names of the error's class and of its base classes, the nearest first."""
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
    errno: int | None = None
    """The errno of an OSError that caused this error; the reader decides by it whether to retry."""
    more: dict[str, JsonValue] = Field(default_factory=dict)
    """The attributes that `ServiceError.carries` names."""

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
        """Rebuild the error with the nearest of its classes below `errors`, or else as a `failure`.

        Raises:
            ValidationError: an attribute does not fit its type.
        """
        known = {kind.__name__: kind for kind in errors.tree()}
        kind = next((known[name] for name in self.classes if name in known), failure)
        error = kind.__new__(kind)  # without __init__, whose parameters differ between classes
        ServiceError.__init__(error, self.detail, where=self.where, hint=self.hint, code=self.code)
        for name in error.carries.keys() & self.more.keys():
            setattr(error, name, TypeAdapter(error.carries[name]).validate_python(self.more[name]))
        if self.errno is not None:
            error.__cause__ = OSError(self.errno, os.strerror(self.errno))
        return error


class Table(dict[str, Call], Generic[Error]):
    """Calls by name.

    Args:
        errors: base class of the errors that the calls raise.
        failure: class for unknown errors and for data that does not fit the table.
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
        """Return a call's arguments, then `tell` if it reports progress. Raises `failure` if they misfit."""
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
        """Return the line of an error; any exception but a ServiceError becomes a `failure`."""
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
        """Return the error for a value of a wrong type, with the place, the allowed type and the value."""
        fault = f": {error}"  # for bytes that are no JSON or no array
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"][outer:]))
            at = f" at {field}" if field else ""
            fault = f"{at}: {first['msg']}; there is {show_found(first['input'])}"
        return self.failure(f"{whole} does not fit its type{fault}")

    def refusal(self, url: str, status: int, location: str | None, body: bytes) -> Error:
        """Make the error for an HTTP reply that refuses the call; the problem's code determines its class."""
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
    """Reads the reply of a call, line by line, over HTTP or a socket.

    `body` holds the encoded arguments. `tell` receives the progress. An error of `tell` is kept in
    `unwelcome`: the caller then has to stop the call, and `result` raises that error.
    """

    def __init__(self, table: Table[Any], name: str, body: bytes = b"", tell: Tell | None = None) -> None:
        self.name, self.body, self._table, self._tell = name, body, table, tell
        self._call = table[name]
        self._lines = Lines(self._call.most_reply_bytes + self._call.reply_growth * len(body))
        self._end: bytes | None = None
        self.unwelcome: Exception | None = None

    def again(self) -> "Reply":
        """Return a new reader for a retry of the call, after this reply was cut off."""
        reply = Reply(self._table, self.name, self.body, self._tell)
        reply.unwelcome = self.unwelcome
        return reply

    def take(self, part: bytes) -> bool:
        """Read a part of the reply; return whether the reply has ended."""
        try:
            lines = self._lines.take(part)
        except ReplyTooLarge as error:
            raise self._table.failure(f"the reply to {self.name!r}: {error}") from error
        return any([self.hear(line) for line in lines])

    def hear(self, line: bytes) -> bool:
        """Read a line; return whether the reply has ended."""
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
            words = show_found(line)
            raise self._table.failure(f"the reply to {self.name!r} does not fit: it has the line {words}")
        self._end = line
        return True

    def result(self) -> Any:
        """Return the result of a reply that has ended, or raise its error."""
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
    """Execute a call, and pass the lines of its reply to `say`.

    Args:
        host: has a coroutine method for each call. The method gets the arguments, and a function that reports
            progress if the call has a type of progress.
    """

    def tell(*values: Any) -> None:
        say(table.write_progress(name, values))

    try:
        arguments = table.read_arguments(name, body, tell)
        line = table.write_result(name, await getattr(host, name)(*arguments))
    except asyncio.CancelledError:
        say(table.write_error(table.failure(f"{name!r} was stopped"), name))
        raise
    except Exception as error:  # the caller must get any error
        line = table.write_error(error, name)
    say(line)


async def reply_lines(table: Table[Any], host: object, name: str, body: bytes) -> AsyncIterator[bytes]:
    """Execute a call and yield the lines of its reply; cancel the call if the reader leaves or stalls."""
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


# Starts a posted call and yields the lines of its reply.
Begin = Callable[[Request, str, bytes], AsyncIterator[bytes]]


def calls_app(table: Table[Any], begin: Begin, keys: Keys, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Build the ASGI app of a process that serves calls; its key also protects the further `routes`."""

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
