"""Requests made from the OpenAPI document, for every route: no 5xx, every error the one shape.

About 20 seconds; more with SCHEMATHESIS_EXAMPLES=200.
"""

import os
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from openapi_spec_validator import validate
from schemathesis.checks import not_a_server_error
from schemathesis.generation import GenerationMode
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)
from starlette.testclient import TestClient

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem
from tests.trainer_backend.jobs.served import acted, checks, openapi, settings_for
from trainer_backend.jobs.app import OPEN_PATHS, create_app
from trainer_backend.jobs.server import open_service

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance
]  # fmt: skip
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "5"))
KEY = "a-key"


DOCUMENT = openapi().document
SCHEMA = schemathesis.openapi.from_dict(DOCUMENT)
OPERATIONS = {operation.label: operation for operation in (one.ok() for one in SCHEMA.get_all_operations())}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = tmp_path_factory.mktemp("runs")
    settings = settings_for(folder, environ={"TRAINER_API_KEY": KEY})
    with (
        open_service(settings, checks(), command=acted) as service,
        TestClient(create_app(service), raise_server_exceptions=False) as client,
    ):
        yield client


@pytest.fixture
def job_id(client: TestClient) -> str:
    """An ended job: of one that lives, a stream would not end."""
    body = '[job]\nname = "quick"\n[model]\npreset = "tiny-0.3m"\n'
    found = client.post("/jobs", content=body, headers={"X-API-Key": KEY}).json()["id"]
    client.post(f"/jobs/{found}/cancel", headers={"X-API-Key": KEY})
    client.get(f"/jobs/{found}/events", headers={"X-API-Key": KEY})
    return str(found)


def send(client: TestClient, case: schemathesis.Case) -> Any:
    sent = case.as_transport_kwargs(base_url="http://testserver")
    known = {name: sent[name] for name in ("method", "url", "params", "json") if name in sent}
    made_up = {name: value.encode("latin-1", "replace") for name, value in dict(sent["headers"]).items()}
    return client.request(**known, content=sent.get("data"), headers={**made_up, "X-API-Key": KEY.encode()})


def check(case: schemathesis.Case, answer: Any) -> None:
    if answer.status_code >= 400 and answer.request.method != "HEAD":
        assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE, answer.text
        assert Problem.model_validate_json(answer.content).status == answer.status_code
    # schemathesis reads the schema of a stream as that of each event.
    is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
    case.validate_response(answer, checks=CHECKS[:-1] if is_stream else CHECKS)


def test_the_document_is_valid_openapi():
    validate(DOCUMENT)
    assert len(OPERATIONS) > 15


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("label", OPERATIONS)
def test_a_request_by_the_document_is_answered_by_it(client, job_id, label, mode):
    operation = OPERATIONS[label]
    if mode is GenerationMode.NEGATIVE and not (
        operation.body or operation.path_parameters or operation.query
    ):
        pytest.skip("it takes nothing that could be wrong")

    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE and "job_id" in (case.path_parameters or {}):
            case.path_parameters["job_id"] = job_id
        check(case, send(client, case))

    ask()


@pytest.mark.parametrize("label", OPERATIONS)
def test_without_a_key_nothing_is_told_but_that(client, job_id, label):
    method, path = label.split(" ")
    answers = [
        client.request(method, path.replace("{job_id}", job_id), headers=headers, content="{}")
        for headers in ({}, {"X-API-Key": KEY + "x"}, {"Authorization": "Bearer nobody"})
    ]
    if path in OPEN_PATHS:
        assert {answer.status_code for answer in answers} == {200}
    else:
        problems = [Problem.model_validate_json(answer.content) for answer in answers]
        assert {(one.status, one.code) for one in problems} == {(401, "unauthorised")}
