"""Remote procedure calls between processes, over HTTP or over a socket.

A table declares the calls of a process: the types of their arguments, results and progress reports.

    CALLS = Table(
        {"update": Call(tuple[list[Episode], int], Metrics, progress=tuple[int, int])},
        errors=TrainerError, failure=LearnerFailed,
    )

Over HTTP, a call is the request POST /calls/{name}, whose body contains the arguments. The reply is a stream
of text lines: any number of lines such as `progress [3, 10]`, then one line `result [...]` or `error {...}`.
`service_kit/socket_calls.py` sends the same lines over a socket.

Numbers, including NaN and infinity, are transferred exactly unless a pydantic model's config excludes them.
If a call raises an error, the caller gets an error of the same class or, if the caller's process does not
know this class, of the nearest base class that it knows. Both processes limit the size of the data that they
read and check its type. Data that does not fit raises the table's error class `failure`, with a message that
names the call, the field and the value.
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
# Largest accepted body of an HTTP reply that refuses a call.
MOST_REFUSAL_BYTES = _MIB
_MOST_WAITING_LINES = 10_000
_MOST_BODY_S = 600.0


class Call:
    """The declaration of one call: its types, its encoding and its size limits.

    Args:
        arguments: the type of the arguments, as one tuple type.
        result: the type of the result.
        progress: the tuple type of the values in a progress report; None if the call reports no progress.
        most_argument_bytes: largest size of the encoded arguments.
        most_reply_bytes: largest size of a line of the reply.
        reply_growth: bytes to add to `most_reply_bytes` for each byte of the encoded arguments.
        encode, decode: convert the arguments to bytes and back; JSON by default.
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
        # In strict mode, a string is not converted to a number. pydantic models follow their own config.
        config = ConfigDict(ser_json_inf_nan="constants", strict=True)

        def adapt(kind: Any) -> TypeAdapter[Any]:
            return TypeAdapter(Annotated[kind, FIRST_ERROR_ONLY], config=config)

        self.arguments, self.result = adapt(arguments), adapt(tuple[result])
        self.progress = None if progress is None else adapt(progress)
        self.most_argument_bytes, self.most_reply_bytes = most_argument_bytes, most_reply_bytes
        self.reply_growth = reply_growth
        self.encode, self.decode = encode, decode


class ErrorBody(Body):
    """The JSON form of a ServiceError, from which the caller's process rebuilds the error."""

    classes: tuple[str, ...]
    """The names of the error's class and of its base classes, in the order of the MRO."""
    code: str
    detail: str
    where: str | None = None
    hint: str | None = None
    errno: int | None = None
    """The errno of the OSError that caused this error, if any; the caller uses it to decide about a retry."""
    more: dict[str, JsonValue] = Field(default_factory=dict)
    """Names and values of the attributes that the error's class lists in `ServiceError.carries`."""

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
        """Rebuild the error.

        Its class is the first one in `classes` that is `errors` or a subclass of `errors` in this process; if
        there is none, its class is `failure`.

        Raises:
            ValidationError: the value of an attribute in `more` has the wrong type.
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
    """Maps the names of the calls to their declarations, and encodes and decodes their data.

    Args:
        errors: base class of the errors that the calls raise.
        failure: class of the error that is raised in place of an error of an unknown class, and for data that
            does not fit the declared types.
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
        """Decode the arguments of a call, and append `tell` if the call reports progress.

        Raises:
            ServiceError: of the class `failure`, if the arguments do not fit their type.
        """
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
        """Return the reply line for an exception of a call.

        An exception that is not a ServiceError is logged, and sent as an error of the class `failure`.
        """
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
        """Return the error for data that does not fit its type.

        The message names the wrong field, the expected type and the value. `whole` describes the data, and
        `outer` is the number of leading items to omit from the path of the field.
        """
        fault = f": {error}"  # the error is no ValidationError if the bytes are not JSON or not an array
        if isinstance(error, ValidationError):
            first = error.errors(include_url=False, include_context=False)[0]
            field = ".".join(map(str, first["loc"][outer:]))
            at = f" at {field}" if field else ""
            fault = f"{at}: {first['msg']}; there is {show_found(first['input'])}"
        return self.failure(f"{whole} does not fit its type{fault}")

    def refusal(self, url: str, status: int, location: str | None, body: bytes) -> Error:
        """Return the error for an HTTP reply that refuses a call.

        The error's class is determined by the code in the reply's body, which should be a problem (RFC 9457).

        Args:
            url: the URL of the call.
            status: the status of the reply.
            location: the Location header of the reply.
            body: the body of the reply.
        """
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
    """Reads the lines of the reply to one call, which arrives over HTTP or a socket.

    Args:
        body: the encoded arguments of the call.
        tell: called with the values of each progress report. If `tell` raises, the exception is stored in the
            attribute `unwelcome`. The caller should then stop the call; `result` raises the stored exception.
    """

    def __init__(self, table: Table[Any], name: str, body: bytes = b"", tell: Tell | None = None) -> None:
        self.name, self.body, self._table, self._tell = name, body, table, tell
        self._call = table[name]
        self._lines = Lines(self._call.most_reply_bytes + self._call.reply_growth * len(body))
        self._end: bytes | None = None
        self.unwelcome: Exception | None = None

    def again(self) -> "Reply":
        """Return a new `Reply` for a retry of the call, after this reply was cut off."""
        reply = Reply(self._table, self.name, self.body, self._tell)
        reply.unwelcome = self.unwelcome
        return reply

    def take(self, part: bytes) -> bool:
        """Process the next bytes of the reply, and return whether the reply is now complete."""
        try:
            lines = self._lines.take(part)
        except ReplyTooLarge as error:
            raise self._table.failure(f"the reply to {self.name!r}: {error}") from error
        return any([self.hear(line) for line in lines])

    def hear(self, line: bytes) -> bool:
        """Process the next line of the reply, and return whether the reply is now complete."""
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
        """Return the result of the complete reply, or raise the error that the reply contains."""
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
    """Execute a call in the process that serves it, and pass each line of the reply to `say`.

    Args:
        host: object with a coroutine method for each call, of the same name. The method gets the call's
            arguments. If the call reports progress, the last argument is a function that sends a report.
        name: the name of the call.
        body: the encoded arguments.
    """

    def tell(*values: Any) -> None:
        say(table.write_progress(name, values))

    try:
        arguments = table.read_arguments(name, body, tell)
        line = table.write_result(name, await getattr(host, name)(*arguments))
    except asyncio.CancelledError:
        say(table.write_error(table.failure(f"{name!r} was stopped"), name))
        raise
    except Exception as error:  # send every error to the caller
        line = table.write_error(error, name)
    say(line)


async def reply_lines(table: Table[Any], host: object, name: str, body: bytes) -> AsyncIterator[bytes]:
    """Execute a call as in `carry_out`, and yield the lines of its reply.

    If the consumer closes this generator, the call is cancelled. If 10,000 lines wait because the consumer is
    too slow, the next progress report of the call raises `failure`.
    """
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


# A function that starts a call, given the HTTP request, the call's name and the encoded arguments, and that
# yields the lines of the reply.
Begin = Callable[[Request, str, bytes], AsyncIterator[bytes]]


def calls_app(table: Table[Any], begin: Begin, keys: Keys, routes: Sequence[BaseRoute] = ()) -> Starlette:
    """Return an ASGI app that serves the calls of `table` over HTTP.

    Args:
        begin: starts a call and yields the lines of its reply.
        keys: the API keys that protect the calls and `routes`.
        routes: further routes of the app.
    """

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
