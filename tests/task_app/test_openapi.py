"""/openapi.json is a valid OpenAPI document, and says of every route what it needs."""

import httpx
import jsonschema
import pytest
from openapi_spec_validator import validate

from service_kit.errors import BodyTooLarge, NoKeyConfigured, RequestDeadline, TooSlow, Unauthorised
from task_app.app import create_app
from task_app.errors import TaskAppError
from task_app.routes.wire import ERRORS
from task_app.settings import Settings
from tests.task_app.counting import KEY

META = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)


@pytest.fixture(scope="module")
def app():
    return create_app(Settings(api_keys=(KEY,)))


@pytest.fixture(scope="module")
def document(app):
    return app.openapi()


async def test_the_document_is_served_and_that_of_openenv_is_valid(app, document):
    transport, headers = httpx.ASGITransport(app), {"X-API-Key": KEY}
    async with httpx.AsyncClient(transport=transport, base_url="http://a", headers=headers) as client:
        assert (await client.get("/openapi.json")).json() == document
        validate((await client.get("/openenv/crafter/openapi.json")).json())


def test_every_operation_has_a_name_of_its_own_a_sentence_and_a_key(document):
    operations = [
        (path, method, operation)
        for path, item in document["paths"].items()
        for method, operation in item.items()
    ]
    assert len(operations) > 20
    names = [operation["operationId"] for _, _, operation in operations]
    assert len(set(names)) == len(names)
    for path, method, operation in operations:
        assert operation.get("summary") or operation.get("description"), (method, path)
        assert bool(operation["security"]) == (path not in ("/", "/health")), (method, path)


def test_the_schemas_of_bodies_are_json_schemas(document):
    for name, schema in document["components"]["schemas"].items():
        assert META.is_valid(schema), name


def test_every_operation_lists_every_error_that_a_route_can_answer(document):
    edge = {Unauthorised, BodyTooLarge, TooSlow, NoKeyConfigured, RequestDeadline}
    statuses = {kind.status for kind in {*TaskAppError.tree(), *edge}}
    assert set(ERRORS) == statuses
    for path, item in document["paths"].items():
        for method, operation in item.items():
            assert {str(status) for status in statuses} <= set(operation["responses"]), (method, path)
            assert list(operation["responses"]["422"]["content"]) == ["application/problem+json"]
