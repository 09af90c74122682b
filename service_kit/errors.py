"""The base of every error that a service replies with, and the errors of the HTTP edge.

    ServiceError                code                    status
    ├── NoKeyConfigured         missing_<variable>      503
    ├── Unauthorised            unauthorised            401
    ├── Forbidden               forbidden               403  another site's page, or a foreign host name
    ├── RouteError              not_found, ...          404, 405 and other statuses of the router
    ├── BodyTooLarge            body_too_large          413
    ├── TooSlow                 too_slow                408  the body was not complete in time
    ├── HeadTooLarge            head_too_large          431  before there is a request
    ├── MalformedRequest        malformed_request       400  no HTTP, or a header is missing or malformed
    ├── TooManyConnections      too_many_connections    503  before there is a request
    ├── RequestDeadline         deadline_exceeded       504  the reply comes before the work is done
    ├── InternalError           internal_error          500
    ├── PortTaken               port_taken              500  at start only, never in a reply
    └── SettingsError           settings_invalid        400  at start only, never in a reply

The trees of the task app (`task_app.errors`) and the trainer (`trainer_backend.errors`) have the same base.
"""

from http import HTTPStatus

from shared_schemas.json_text import encodable
from shared_schemas.problem import Problem


class ServiceError(Exception):
    """An error with a name for programs (`code`) and a sentence for people (`detail`), which holds no key.

    Attributes:
        status: the HTTP status of the reply.
        title: name of the class for people; None: the phrase of the status.
        where: the place of the fault: a header, a body path, a setting.
        hint: the likely remedy.
        retry_after_s: when a client should try again, if that may help.
        recurs: whether another try would fail too, because the cause is in code, data or a setting.
    """

    code = "service_error"
    status = 500
    title: str | None = None
    retry_after_s: int | None = None
    recurs = False

    def __init__(
        self, detail: str, *, where: str | None = None, hint: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.where = where
        self.hint = hint
        if code is not None:
            self.code = code

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        if not self.hint:
            return f"{place}{self.detail}"
        end = "" if self.detail.endswith((".", "?", "!")) else "."
        return f"{place}{self.detail}{end} {self.hint}"

    def release_frames(self) -> None:
        """Forget where it was raised, and its causes too, once it was answered or recorded.

        The frames hold what the work held, such as a whole episode, in cycles that only the garbage collector
        finds.
        """
        errors: list[BaseException | None] = [self]
        while errors:
            error = errors.pop()
            if error is not None and error.__traceback__ is not None:
                error.__traceback__ = None
                errors += error.__cause__, error.__context__

    def problem(self) -> Problem:
        """The error as the body of a reply."""
        return Problem(
            title=self.title or HTTPStatus(self.status).phrase,
            status=self.status,
            code=self.code,
            detail=encodable(self.detail),
            where=self.where and encodable(self.where),
            hint=self.hint,
        )


class NoKeyConfigured(ServiceError):
    """The service was started without a key, so nobody can use it.

    Args:
        variable: the environment variable of the key.
    """

    status = 503

    def __init__(self, variable: str) -> None:
        super().__init__(
            "this service has no API key configured, so it answers nobody",
            hint=f"Set {variable} and start it again.",
            code=f"missing_{variable.lower()}",
        )


class Unauthorised(ServiceError):
    code = "unauthorised"
    status = 401


class Forbidden(ServiceError):
    code = "forbidden"
    status = 403


class RouteError(ServiceError):
    """A refusal of the router, or of a library below it, that has only a status."""

    def __init__(self, status: HTTPStatus, detail: str, *, where: str) -> None:
        super().__init__(detail, where=where, code=status.name.lower())
        self.status = status


class BodyTooLarge(ServiceError):
    code = "body_too_large"
    status = 413


class TooSlow(ServiceError):
    code = "too_slow"
    status = 408


class HeadTooLarge(ServiceError):
    code = "head_too_large"
    status = 431


class MalformedRequest(ServiceError):
    code = "malformed_request"
    status = 400


class TooManyConnections(ServiceError):
    code = "too_many_connections"
    status = 503
    retry_after_s = 5


class RequestDeadline(ServiceError):
    code = "deadline_exceeded"
    status = 504


class InternalError(ServiceError):
    code = "internal_error"


class PortTaken(ServiceError):
    code = "port_taken"


class SettingsError(ServiceError):
    code = "settings_invalid"
    status = 400
