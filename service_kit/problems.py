"""Replies to errors: every service answers with RFC 9457 problem+json (shared_schemas.problem)."""

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
# These replies close the connection, because the unread rest of a body would be read as the next request.
_BODY_NOT_READ = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})


def problem_response(error: ServiceError) -> Response:
    """Make the reply to an error, and drop the error's tracebacks."""
    error.release_frames()
    return reply(error, error.problem().model_dump_json(exclude_none=True))


def reply(error: ServiceError, body: str | bytes) -> Response:
    """Make a reply with this body and the error's status and headers."""
    headers = {}
    if error.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if error.status in _BODY_NOT_READ:
        headers["Connection"] = "close"
    return Response(body, status_code=error.status, media_type=PROBLEM_MEDIA_TYPE, headers=headers)


class BodyError(HTTPException):
    """Wraps an error that occurs while FastAPI reads a body: FastAPI then passes on HTTPExceptions only."""

    def __init__(self, error: ServiceError) -> None:
        super().__init__(error.status, error.detail)
        self.error = error


def install_problem_handlers(app: Starlette, respond: Respond = problem_response) -> None:
    """Let the app reply to every error with a problem; unexpected errors are logged."""

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
    """Make the reply to the router's 404 and 405, and to an error of the gate while a body is read."""
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
        # The router would name the methods of the path's first route only.
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
    """Make the reply to an exception that is not a ServiceError; only the log has its details."""
    log.error("request_failed", method=request.method, path=request.url.path, exc_info=error)
    return respond(InternalError("an error inside the service; its log says which", where=request.url.path))


class SelfDescribing(Protocol):
    """An app with an OpenAPI document, such as FastAPI's."""

    def openapi(self) -> dict[str, Any]: ...


def problem_responses(statuses: Iterable[int]) -> dict[int | str, dict[str, Any]]:
    """Make the entries of /openapi.json for error statuses whose body is a problem."""
    return error_responses(statuses, Problem, kind=PROBLEM_MEDIA_TYPE)


def error_responses(
    statuses: Iterable[int], *models: type[BaseModel], kind: str = "application/json"
) -> dict[int | str, dict[str, Any]]:
    """Make the entries of /openapi.json for error statuses whose body is one of these models.

    The entries refer to schemas that `describe` adds. If they held the models themselves, FastAPI would build
    a validator for each status of each route.
    """
    schemas = [{"$ref": _REFERENCE.format(model=model.__name__)} for model in models]
    content = {kind: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in statuses}


def describe(
    app: SelfDescribing, *, open_paths: Collection[str], errors: Sequence[type[BaseModel]] = ()
) -> None:
    """Add the API key and the bodies of errors to /openapi.json."""
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
