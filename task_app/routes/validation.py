"""The reply to a body, query or path that does not fit its route: a problem that names the place."""

from collections.abc import Iterable
from types import GenericAlias
from typing import Any, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from service_kit.problems import problem_response
from task_app.complaints import invalid, most_specific
from task_app.routes.wire import MISSPELT


async def validation_response(request: Request, exc: Exception) -> Response:
    """FastAPI's handler for requests that fail validation."""
    assert isinstance(exc, RequestValidationError)
    error = dict(most_specific(exc.errors()))
    place = error["loc"]
    if error["type"] == MISSPELT:
        error["loc"], error["input"] = (*place[1:], error["ctx"]["name"]), None
    elif place == ("body",):
        error["msg"] += "; send it as JSON with Content-Type: application/json"
    elif place[0] in ("body", "query", "path", "header"):
        error["loc"] = place[1:] or place
    return problem_response(invalid(error, known=_known_fields(request, place)))


def _known_fields(request: Request, place: tuple[Any, ...]) -> Iterable[str]:
    """The keys that are allowed next to the one at `place`, from the body's model."""
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
