"""The base class of every error that a service replies with, and the errors that all services share.

The errors of the task app (`task_app.errors`) and of the trainer (`trainer_backend.errors`) are subclasses.
"""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shared_schemas.plain_text import encodable

if TYPE_CHECKING:
    from shared_schemas.problem import Problem


class ServiceError(Exception):
    """Base class of errors: `code` identifies the error for programs, and `detail` explains it to people.

    `detail` must not contain a secret, because clients receive it. `where` names the wrong part of a request,
    and `hint` says how to correct it.

    Keywords of the class statement set class attributes; a subclass inherits those that it does not set:

        class BodyTooLarge(ServiceError, code="body_too_large", status=413): ...
    """

    code = "service_error"
    """Identifies the class of the error; classes of the same top-level package must have different codes."""
    status = 500
    """HTTP status of a reply with this error."""
    title: str | None = None
    """Readable title of this class of errors; None means the phrase of `status`, such as `Not Found`."""
    retry_after_s: int | None = None
    """Seconds after which a client should retry (the Retry-After header); None if a retry does not help."""
    recurs = False
    """Whether a retry would fail again, because the cause lies in code, data or a setting."""
    carries: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Names and types of further attributes that `service_kit.rpc` sends when the error crosses processes."""

    def __init_subclass__(
        cls,
        *,
        code: str | None = None,
        status: int | None = None,
        title: str | None = None,
        retry_after_s: int | None = None,
        recurs: bool | None = None,
    ) -> None:
        super().__init_subclass__()
        given = {
            "code": code, "status": status, "title": title, "retry_after_s": retry_after_s, "recurs": recurs
        }  # fmt: skip
        for name, value in given.items():
            if value is not None:
                setattr(cls, name, value)
        HTTPStatus(cls.status)  # raises a ValueError for a number that is no status
        service = cls.__module__.partition(".")[0]
        for other in ServiceError.tree() if code is not None else ():
            is_of_service = other.__module__.partition(".")[0] == service
            # When a module is reloaded, its classes are declared again with the same names and codes.
            if other.code == code and is_of_service and other.__qualname__ != cls.__qualname__:
                raise TypeError(
                    f"{cls.__qualname__} has the code {code!r}, which is that of {other.__qualname__}"
                )

    @classmethod
    def tree(cls) -> Iterator[type[Self]]:
        """Yield this class and all of its direct and indirect subclasses."""
        yield cls
        for kind in cls.__subclasses__():
            yield from kind.tree()

    def __init__(
        self, detail: str, *, where: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(detail)
        self.detail, self.where, self.hint = detail, where, hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        if not self.hint:
            return f"{place}{self.detail}"
        end = "" if self.detail.endswith((".", "?", "!")) else "."
        return f"{place}{self.detail}{end} {self.hint}"

    def release_frames(self) -> None:
        """Remove the tracebacks of this error and of its causes; call this after the error was handled.

        A traceback keeps its frames' local variables alive, such as a whole episode. These references form
        cycles, so the memory would stay in use until the garbage collector runs.
        """
        errors: list[BaseException | None] = [self]
        while errors:
            error = errors.pop()
            if error is not None and error.__traceback__ is not None:
                error.__traceback__ = None
                errors += error.__cause__, error.__context__

    def problem(self) -> "Problem":
        """Return the body of an HTTP reply with this error (RFC 9457 problem details)."""
        from shared_schemas.problem import Problem  # imports pydantic, which commands do not need

        return Problem(
            title=self.title or HTTPStatus(self.status).phrase,
            status=self.status,
            code=self.code,
            detail=encodable(self.detail),
            where=self.where and encodable(self.where),
            hint=self.hint,
        )


class NoKeyConfigured(ServiceError, status=503):
    """The service needs an API key but was started without one, so it refuses every request."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            "this service has no API key configured, so it refuses every request",
            hint=f"Set {variable} and start it again.",
            code=f"missing_{variable.lower()}",
        )


class Unauthorised(ServiceError, code="unauthorised", status=401):
    """The API key of the request is missing or wrong."""


class Forbidden(ServiceError, code="forbidden", status=403):
    """The origin of the request is not allowed: a browser sent it for a page of another site.

    A service without API keys also raises it if a proxy forwarded the request, or if the Host header does not
    name this machine.
    """


class RouteError(ServiceError):
    """An error of routing; its code is the lower-case name of its HTTP status, such as `not_found`."""

    def __init__(self, status: HTTPStatus, detail: str, *, where: str) -> None:
        super().__init__(detail, where=where, code=status.name.lower())
        self.status = status


class BodyTooLarge(ServiceError, code="body_too_large", status=413):
    """The body of the request is larger than `max_body_bytes`."""


class TooSlow(ServiceError, code="too_slow", status=408):
    """The body of the request was not complete in time."""


class HeadTooLarge(ServiceError, code="head_too_large", status=431):
    """The request line and the headers together are larger than `max_header_bytes`."""


class MalformedRequest(ServiceError, code="malformed_request", status=400):
    """The request is not HTTP, or a header is missing or malformed."""


class TooManyConnections(ServiceError, code="too_many_connections", status=503, retry_after_s=5):
    """The service already has the largest allowed number of open connections (`max_connections`)."""


class RequestDeadline(ServiceError, code="deadline_exceeded", status=504):
    """The service could not answer a request in time; it continues to work on the request."""


class InternalError(ServiceError, code="internal_error"):
    """The reply to an unexpected exception, that is, one that is not a ServiceError."""


class PortTaken(ServiceError, code="port_taken"):
    """The service cannot listen on its port. It is raised while the service starts, never in a reply."""


class SettingsError(ServiceError, code="settings_invalid", status=400):
    """A setting or a plug-in file is invalid. It is raised while a process starts, never in a reply."""
