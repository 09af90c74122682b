"""Makes the HTTP replies to errors, in the format problem+json of RFC 9457 (see shared_schemas.problem).

Such a reply body is called a problem.
"""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import cache
from http import HTTPStatus
from typing import Any, Protocol

import structlog
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match

from service_kit.errors import InternalError, RouteError, ServiceError
from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem

log = structlog.get_logger("service")

Respond = Callable[[ServiceError], Response]

_REFERENCE = "#/components/schemas/{model}"
_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
_HEADER, _BEARER = "X-API-Key", "Bearer"
# Replies with these statuses close the connection; otherwise the server would read the rest of the request's
# body as the next request.
_BODY_NOT_READ = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})


def problem_response(error: ServiceError) -> Response:
    """Return an HTTP reply whose body is the problem of `error`, and release the error's tracebacks."""
    error.release_frames()
    return reply(error, error.problem().model_dump_json(exclude_none=True))


def reply(error: ServiceError, body: str | bytes) -> Response:
    """Return an HTTP reply with this body and with the status and headers that belong to `error`."""
    headers = {}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in _BODY_NOT_READ:
        headers["Connection"] = "close"
    return Response(body, status_code=error.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers)


class BodyError(HTTPException):
    """Wraps a ServiceError that occurs while a request's body is read.

    It is an HTTPException because FastAPI hides any other exception that occurs while it reads a body.
    """

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error.status, error.detail)
        self.error = error


def install_problem_handlers(app: Starlette, respond: Respond = problem_response) -> None:
    """Make `app` reply to every exception with a problem, and log each unexpected exception.

    `respond` makes the reply to a ServiceError.
    """

    async def ours(request: Request, error: Exception) -> Response:
        assert isinstance(error, ServiceError)
        return respond(error)

    async def http(request: Request, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        return _router_response(request, error, respond)

    async def internal(request: Request, error: Exception) -> Response:
        return internal_error_response(request, error, respond)

    app.add_exception_handler(ServiceError, ours)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(Exception, internal)


def _router_response(request: Request, error: HTTPException, respond: Respond) -> Response:
    """Return the reply to an HTTPException: a `BodyError`, or an error of the router, such as 404 or 405."""
    if isinstance(error, BodyError):
        return respond(error.error)
    status = HTTPStatus(error.status_code)
    detail = {
        HTTPStatus.NOT_FOUND: "there is no such route",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not possible here",
    }.get(status, str(error.detail))
    response = respond(RouteError(status, detail, where=request.url.path))
    response.headers.update(error.headers or {})
    if status is HTTPStatus.METHOD_NOT_ALLOWED:
        # The router's own Allow header would name only the methods of the first route with this path.
        routes: list[BaseRoute] = request.app.routes
        possible = [
            method
            for method in sorted(_METHODS)
            if any(route.matches({**request.scope, "method": method})[0] is Match.FULL for route in routes)
        ]
        response.headers["Allow"] = ", ".join(possible)
    return response


def internal_error_response(
    request: Request, error: Exception, respond: Respond = problem_response
) -> Response:
    """Log an unexpected exception, and return a reply with status 500 that does not reveal its details."""
    log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
    return respond(InternalError("an error inside the service; its log says which", where=request.url.path))


class SelfDescribing(Protocol):
    """An app that returns an OpenAPI document, such as a FastAPI app."""

    def openapi(self) -> dict[str, Any]: ...


def problem_responses(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of these error statuses, for replies whose body is a problem."""
    return error_responses(statuses, Problem, kind=PROBLEM_MEDIA_TYPE)


def error_responses(
    statuses: Iterable[int], *models: type[BaseModel], kind: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    """Return the OpenAPI entries of these error statuses, for replies whose body is one of `models`.

    The entries refer by name to schemas that `describe` adds to the document. If the entries contained the
    models themselves, FastAPI would build a validator for each status of each route. `kind` is the media
    type of the replies.
    """
    schemas = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in models]
    content = {kind: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def describe(
    app: SelfDescribing, *, open_paths: Collection[str], errors: Sequence[type[BaseModel]] = ()
) -> None:
    """Extend the app's OpenAPI document by the API key and by the schemas of error replies.

    Args:
        open_paths: paths that need no key.
        errors: models of error replies, in addition to `Problem`.
    """
    make_document = app.openapi

    @cache
    def schema() -> dict[str, Any]:
        document = make_document()
        components = document.setdefault("components", {})
        bodies = [(model, "serialization") for model in (Problem, *errors)]
        _, defined = models_json_schema(bodies, ref_template=_REFERENCE)  # type: ignore[arg-type]
        components.setdefault("schemas", {}).update(defined["$defs"])
        components["securitySchemes"] = {
            _HEADER: {"type": "apiKey", "in": "header", "name": _HEADER},
            _BEARER: {"type": "http", "scheme": "bearer"},
        }
        for path, operations in document["paths"].items():
            for operation in operations.values():
                operation["security"] = [] if path in open_paths else [{_HEADER: []}, {_BEARER: []}]
        return document

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way to extend it
