"""Answers requests whose body, query or path fails validation; the reply names the faulty field."""

from types import GenericAlias
from typing import Any, get_args

from fastapi import Request
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel
from starlette.responses import Response

from service_kit.problems import problem_response
from shared_schemas.rollouts import PUBLISHED_PLACES, RolloutBatch
from task_app.complaints import invalid, list_keys, most_specific
from task_app.routes.wire import MISSPELT


async def validation_response(request: Request, exc: Exception) -> Response:
    """Return the problem+json reply to a request that fails FastAPI's validation."""
    assert isinstance(exc, RequestValidationError)
    error = dict(most_specific(exc.errors()))
    place = error["loc"]
    if error["type"] == MISSPELT:
        error["loc"], error["input"] = (*place[1:], error["ctx"]["name"]), None
    elif place == ("body",):
        error["msg"] += "; send it as JSON with Content-Type: application/json"
    elif place[0] in ("body", "query", "path", "header"):
        error["loc"] = place[1:] or place
    model = _find_model(request, place)
    known = list_keys(model) if model is not None else ()
    return problem_response(invalid(error, known=known, meant=_suggest_place(model, place)))


def _find_model(request: Request, place: tuple[Any, ...]) -> type[BaseModel] | None:
    """Return the pydantic model of the object that contains the key at `place`; None if there is no model."""
    route = request.scope.get("route")
    body = route.body_field if isinstance(route, APIRoute) else None
    model = _model_in(body.field_info.annotation) if body is not None else None
    for part in place[1:-1]:
        if model is not None and isinstance(part, str) and part in model.model_fields:
            model = _model_in(model.model_fields[part].annotation)
    return model


def _suggest_place(model: type[BaseModel] | None, place: tuple[Any, ...]) -> str | None:
    """Return the path at which a misplaced key belongs; None if there is no such path.

    The key may be a name in PUBLISHED_PLACES, or the key of an object inside the model.
    """
    if model is None:
        return None
    name = str(place[-1])
    if name in PUBLISHED_PLACES and (model is RolloutBatch or place[1:2] == ("rollouts",)):
        return ("rollouts.0." if model is RolloutBatch else "") + PUBLISHED_PLACES[name]
    parts = {part: _model_in(field.annotation) for part, field in model.model_fields.items()}
    return next((f"{part}.{name}" for part, own in parts.items() if own and name in list_keys(own)), None)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the pydantic model M of an annotation `M`, `M | None` or `tuple[M, ...]`; else None."""
    if isinstance(annotation, type) and not isinstance(annotation, GenericAlias):
        return annotation if issubclass(annotation, BaseModel) else None
    return next((model for model in map(_model_in, get_args(annotation)) if model is not None), None)
