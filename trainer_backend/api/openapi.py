"""What /openapi.json says beside the routes: the key, and that every error is a problem."""

from http import HTTPStatus
from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from trainer_backend.api.gate import OPEN_PATHS

_HEADER, _BEARER = "X-API-Key", "Bearer"
ERRORS = (400, 401, 403, 404, 408, 409, 413, 415, 422, 500, 503)


def problem_responses() -> dict[int | str, dict[str, Any]]:
    """For every route: the statuses of errors, all with the one error body."""
    content = {PROBLEM_MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/Problem"}}}
    return {status: {"description": HTTPStatus(status).phrase, "content": content} for status in ERRORS}


def describe(app: FastAPI) -> None:
    """Let the app's schema name the key, which the gate checks before FastAPI."""

    def schema() -> dict[str, Any]:
        if app.openapi_schema is None:
            found = get_openapi(title=app.title, version=app.version, routes=app.routes)
            app.openapi_schema = _with_keys(found)
        return app.openapi_schema

    app.openapi = schema  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _with_keys(schema: dict[str, Any]) -> dict[str, Any]:
    components = schema.setdefault("components", {})
    components.setdefault("schemas", {})["Problem"] = Problem.model_json_schema()
    components["securitySchemes"] = {
        _HEADER: {"type": "apiKey", "in": "header", "name": _HEADER},
        _BEARER: {"type": "http", "scheme": "bearer"},
    }
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in OPEN_PATHS else [{_HEADER: []}, {_BEARER: []}]
    return schema
