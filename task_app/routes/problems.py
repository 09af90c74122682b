"""Every error of the service as one shape: RFC 9457 problem+json (shared_schemas.problem)."""

from collections.abc import Iterable
from http import HTTPStatus
from types import GenericAlias
from typing import Any, get_args

import structlog
from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.routing import Match

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from task_app.complaints import invalid, most_telling
from task_app.errors import BodyTooLarge, CriticalError, TaskAppError, TooSlow, encodable
from task_app.routes.bodies import MISSPELT

_METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")

log = structlog.get_logger("task_app")

# What is left of such a body would be taken for the next request.
_BODY_NOT_READ = frozenset({HTTPStatus.REQUEST_TIMEOUT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE})


def install_problem_handlers(app: FastAPI) -> None:
    app.add_exception_handler(TaskAppError, _ours)
    app.add_exception_handler(RequestValidationError, _validation)
    app.add_exception_handler(HTTPException, _http)
    app.add_exception_handler(Exception, unforeseen)


def problem_response(error: TaskAppError) -> Response:
    """The reply to an error of our tree."""
    return _reply(problem_of(error), retry_after_s=error.retry_after_s)


def problem_of(error: TaskAppError) -> Problem:
    """An error of our tree as data; a CriticalError keeps its inside for the log."""
    internal = isinstance(error, CriticalError)
    return Problem(
        title=HTTPStatus(error.status).phrase,
        status=error.status,
        code=error.code,
        detail="a plug-in of this task app failed; its log says how" if internal else encodable(error.detail),
        where=error.where and encodable(error.where),
        hint=error.hint,
    )


def _reply(
    problem: Problem, *, retry_after_s: int | None = None, allow: Iterable[str] | None = None
) -> Response:
    headers = {}
    if allow is not None:
        headers["Allow"] = ", ".join(sorted(allow))
    if problem.status == HTTPStatus.UNAUTHORIZED:
        headers["WWW-Authenticate"] = "Bearer"
    if retry_after_s is not None:
        headers["Retry-After"] = str(retry_after_s)
    if problem.status in _BODY_NOT_READ:
        headers["Connection"] = "close"
    return Response(
        problem.model_dump_json(exclude_none=True),
        status_code=problem.status,
        media_type=PROBLEM_MEDIA_TYPE,
        headers=headers,
    )


async def _ours(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, TaskAppError)
    return problem_response(exc)


async def _validation(request: Request, exc: Exception) -> Response:
    assert isinstance(exc, RequestValidationError)
    return validation_problem(request, exc)


def validation_problem(request: Request, exc: RequestValidationError) -> Response:
    """The reply to a body, query or path that is not what its route declares."""
    error = dict(most_telling(exc.errors()))
    place = error["loc"]
    if error["type"] == MISSPELT:
        error["loc"], error["input"] = (*place[1:], error["ctx"]["name"]), None
    elif place == ("body",):
        error["msg"] += "; send it as JSON with Content-Type: application/json"
    elif place[0] in ("body", "query", "path", "header"):
        error["loc"] = place[1:] or place
    return problem_response(invalid(error, known=_known_fields(request, place)))


async def _http(request: Request, exc: Exception) -> Response:
    """404 and 405 of the router, 408 and 413 of the gate."""
    assert isinstance(exc, HTTPException)
    status = HTTPStatus(exc.status_code)
    if status is HTTPStatus.REQUEST_ENTITY_TOO_LARGE:
        return problem_response(BodyTooLarge(exc.detail))
    if status is HTTPStatus.REQUEST_TIMEOUT:
        return problem_response(TooSlow(exc.detail, where="body"))
    detail = {
        HTTPStatus.NOT_FOUND: "there is no such route",
        HTTPStatus.METHOD_NOT_ALLOWED: f"{request.method} is not possible here",
    }.get(status, str(exc.detail))
    return _reply(
        Problem(
            title=status.phrase,
            status=status,
            code=status.name.lower(),
            detail=detail,
            where=request.url.path,
        ),
        allow=_methods(request) if status is HTTPStatus.METHOD_NOT_ALLOWED else None,
    )


def _methods(request: Request) -> set[str]:
    """What the path may be asked by: the router itself would name the methods of the first route alone."""
    return {
        method
        for method in _METHODS
        if any(
            route.matches({**request.scope, "method": method})[0] is Match.FULL
            for route in request.app.routes
        )
    }


async def unforeseen(request: Request, exc: Exception) -> Response:
    log.error("request_failed", method=request.method, path=request.url.path, exc_info=exc)
    return _reply(
        Problem(
            title=HTTPStatus.INTERNAL_SERVER_ERROR.phrase,
            status=500,
            code="internal_error",
            detail="an error inside the task app; its log says which",
            where=request.url.path,
        )
    )


def _known_fields(request: Request, place: tuple[Any, ...]) -> Iterable[str]:
    """The keys allowed next to the one at `place`, found by walking the body's model along the path."""
    route = request.scope.get("route")
    body = route.body_field if isinstance(route, APIRoute) else None
    model = _model_in(body.field_info.annotation) if body is not None else None
    for part in place[1:-1]:
        if model is not None and isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return model.model_fields if model is not None else ()


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """The model in `M`, `M | None` or `tuple[M, ...]`."""
    if isinstance(annotation, type) and not isinstance(annotation, GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((model for model in map(_model_in, get_args(annotation)) if model is not None), None)
