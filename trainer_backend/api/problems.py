"""Every error of the service as one shape: RFC 9457 problem+json (shared_schemas.problem)."""

from http import HTTPStatus

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from shared_schemas.base import did_you_mean
from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from trainer_backend.api.errors import ApiError, BodyTooLarge
from trainer_backend.errors import TrainerError

log = structlog.get_logger("trainer")

# Of a store that is away: about as long as a database needs to start.
_RETRY_AFTER_S = "5"
# What the gate finds while a body is read has the codes that it has before that.
_CODES = {
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: BodyTooLarge.code,
    HTTPStatus.REQUEST_TIMEOUT: "body_too_slow",
    HTTPStatus.UNPROCESSABLE_ENTITY: ApiError.code,
}
# What is left of such a body would be taken for the next request.
_BODY_NOT_READ = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})


def install_problem_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TrainerError, _ours)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, unforeseen)


def problem_response(error: TrainerError) -> Response:
    """The reply to an error of our tree."""
    return _reply(error.problem())


def _reply(problem: Problem) -> Response:
    headers = {}
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if problem.status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = _RETRY_AFTER_S
    if problem.status in _BODY_NOT_READ:
        headers["Connection"] = "close"
    body = problem.model_dump_json(exclude_none=True)
    return Response(body, status_code=problem.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers)


async def _ours(request: Request, error: Exception) -> Response:
    assert isinstance(error, TrainerError)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        log.warning("request_failed", method=request.method, path=request.url.path, detail=str(error))
    return problem_response(error)


async def _validation(request: Request, error: Exception) -> Response:
    """The first finding of a query, a header or a path that is not as it is documented."""
    assert isinstance(error, RequestValidationError)
    found = next((item for item in error.errors() if item["type"] == "extra_forbidden"), error.errors()[0])
    place, *path = (str(part) for part in found["loc"])
    name = ".".join(path) or place
    if found["type"] == "extra_forbidden":
        known = found.get("ctx", {}).get("known", ())
        told = f"{name[:80]!r} is not known here{did_you_mean(path[-1][:80], known) if known else ''}"
    else:
        told = f"{name}: {found['msg']}"
    return problem_response(ApiError(told, where=f"{place} {name}" if path else place))


async def _http(request: Request, error: Exception) -> Response:
    """404 and 405 of the router, and what the gate found while the body was read."""
    assert isinstance(error, HTTPException)
    status = HTTPStatus(error.status_code)
    detail = {
        HTTPStatus.NOT_FOUND: "there is no such route",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not possible here",
    }.get(status, str(error.detail))
    response = _reply(
        Problem(
            title=status.phrase,
            status=status,
            code=_CODES.get(status, status.name.lower()),
            detail=detail,
            where=request.url.path,
        )
    )
    response.headers.update(error.headers or {})
    return response


async def unforeseen(request: Request, error: Exception) -> Response:
    log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
    return _reply(
        Problem(
            title=HTTPStatus.INTERNAL_SERVER_ERROR.phrase,
            status=500,
            code="internal_error",
            detail="an error inside the trainer service; its log says which",
            where=request.url.path,
        )
    )
