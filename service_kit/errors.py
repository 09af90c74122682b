"""The base class of every error that a service replies with, and the errors that all services share.

The errors of the task app (`task_app.errors`) and of the trainer (`trainer_backend.errors`) derive from it.
"""

from collections.abc import Iterator, Mapping
from http import HTTPStatus
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from shared_schemas.plain_text import encodable

if TYPE_CHECKING:
    from shared_schemas.problem import Problem


class ServiceError(Exception):
    """An error with a name for programs (`code`) and a sentence for people (`detail`), which holds no secret.

    Class keywords set the attributes of the class; a subclass inherits the attributes that it does not set:

        class BodyTooLarge(ServiceError, code="body_too_large", status=413): ...
    """

    code = "service_error"
    """Unique among the classes of a service (a top package)."""
    status = 500
    """HTTP status of the reply."""
    title: str | None = None
    """Name of the class for people; None stands for the phrase of the status, such as `Not Found`."""
    retry_after_s: int | None = None
    """Seconds after which a client should retry; None if a retry does not help."""
    recurs = False
    """Whether a retry would fail too, because the cause is in code, data or a setting."""
    carries: ClassVar[Mapping[str, Any]] = MappingProxyType({})
    """Further attributes that `service_kit.rpc` sends with the error to another process: names and types."""

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
            # Reloading a module declares its classes a second time.
            if other.code == code and is_of_service and other.__qualname__ != cls.__qualname__:
                raise TypeError(
                    f"{cls.__qualname__} has the code {code!r}, which is that of {other.__qualname__}"
                )

    @classmethod
    def tree(cls) -> Iterator[type[Self]]:
        """Yield this class and all classes derived from it."""
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
        """Drop the tracebacks of this error and its causes, after it was answered or recorded.

        The frames refer to large objects, such as a whole episode, in cycles that only the garbage collector
        frees.
        """
        errors: list[BaseException | None] = [self]
        while errors:
            error = errors.pop()
            if error is not None and error.__traceback__ is not None:
                error.__traceback__ = None
                errors += error.__cause__, error.__context__

    def problem(self) -> "Problem":
        """Return the body of the reply to this error."""
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
    """The service was started without a key in its environment variable, so it refuses every request."""

    def __init__(self, variable: str) -> None:
        super().__init__(
            "this service has no API key configured, so it refuses every request",
            hint=f"Set {variable} and start it again.",
            code=f"missing_{variable.lower()}",
        )


class Unauthorised(ServiceError, code="unauthorised", status=401):
    """The key is missing or wrong."""


class Forbidden(ServiceError, code="forbidden", status=403):
    """A page of another site sent the request; or, without keys, a proxy did, or its Host is not local."""


class RouteError(ServiceError):
    """An error whose code is the name of its HTTP status: `not_found` for a path without a route."""

    def __init__(self, status: HTTPStatus, detail: str, *, where: str) -> None:
        super().__init__(detail, where=where, code=status.name.lower())
        self.status = status


class BodyTooLarge(ServiceError, code="body_too_large", status=413):
    """The body is larger than `max_body_bytes`."""


class TooSlow(ServiceError, code="too_slow", status=408):
    """The body was not complete in time."""


class HeadTooLarge(ServiceError, code="head_too_large", status=431):
    """Request line and headers are larger than `max_header_bytes`."""


class MalformedRequest(ServiceError, code="malformed_request", status=400):
    """The request is not HTTP, or a header is missing or malformed."""


class TooManyConnections(ServiceError, code="too_many_connections", status=503, retry_after_s=5):
    """The service has `max_connections` open connections."""


class RequestDeadline(ServiceError, code="deadline_exceeded", status=504):
    """The work of a request is not done in time; the work continues after this reply."""


class InternalError(ServiceError, code="internal_error"):
    """An exception that is not a ServiceError."""


class PortTaken(ServiceError, code="port_taken"):
    """The service cannot listen on its port; raised at start, never in a reply."""


class SettingsError(ServiceError, code="settings_invalid", status=400):
    """A setting of the service is wrong; raised at start, never in a reply."""
