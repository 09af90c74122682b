"""Requests made from the OpenAPI document, for every route: no 5xx, every error the one shape.

Random ids lead nowhere, so the ids of living things are put where an id may stand: requests reach what is
behind them. About 20 seconds; more with SCHEMATHESIS_EXAMPLES=200.
"""

import os
from dataclasses import replace
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
from task_app.app import OPEN_PATHS, create_app
from task_app.plugins import InteractionEntry
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards, rollout
from tests.task_app.interactions.users import Noted

CHECKS = [
    not_a_server_error, status_code_conformance, content_type_conformance, response_schema_conformance
]  # fmt: skip
EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "5"))
NOTED = InteractionEntry("noted", Noted, {})
APP = create_app(
    Settings(api_keys=(KEY,), max_wait_s=0.0), boards=replace(boards(), interactions={"noted": NOTED})
)
SCHEMA = schemathesis.openapi.from_dict(APP.openapi())
OPERATIONS = {operation.label: operation for operation in (one.ok() for one in SCHEMA.get_all_operations())}
NAMES = {"env_name": "counting", "policy_name": "planned", "seed": 3}


@pytest.fixture(scope="module")
def client():
    with TestClient(APP, raise_server_exceptions=False) as client:
        yield client


@pytest.fixture
def ids(client):
    """Something that lives, of every kind that a request may name."""

    def post(path: str, **body: Any) -> Any:
        answer = client.post(path, json=body, headers={"X-API-Key": KEY})
        assert answer.status_code < 300, answer.text
        return answer.json()

    env_id = post("/env/create", env_name="counting")["env_id"]
    policy_id = post("/policy/create", policy_name="planned", bound_env_id=env_id)["policy_id"]
    interaction_id = post("/interaction/start", name="noted")["interaction_id"]
    post("/rollouts", rollouts=[rollout(f"for/{env_id}", run_id=env_id)])
    return {
        "env_id": env_id, "bound_env_id": env_id, "env_ids": [env_id], "run_id": env_id,
        "policy_id": policy_id, "policy_ids": [policy_id], "interaction_id": interaction_id,
        "rollout_id": f"for/{env_id}", "rollout_ids": [f"for/{env_id}"], **NAMES,
    }  # fmt: skip


def living(value: Any, ids: dict[str, Any]) -> Any:
    """The same data with what lives in the places that name it."""
    if isinstance(value, dict):
        return {name: ids.get(name, living(one, ids)) for name, one in value.items()}
    return [living(one, ids) for one in value] if isinstance(value, list) else value


def send(client: TestClient, case: schemathesis.Case, **headers: str) -> Any:
    sent = case.as_transport_kwargs(base_url="http://testserver")
    known = {name: sent[name] for name in ("method", "url", "params", "json") if name in sent}
    return client.request(**known, content=sent.get("data"), headers={**dict(sent["headers"]), **headers})


def check(case: schemathesis.Case, answer: Any) -> None:
    # Model calls of agents are refused in the form of their own clients.
    speaks_a_dialect = "/{capture_id}/v1/" in case.path and answer.status_code in (400, 404)
    if answer.status_code >= 400 and answer.request.method != "HEAD" and not speaks_a_dialect:
        assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE, answer.text
        assert Problem.model_validate_json(answer.content).status == answer.status_code
    case.validate_response(answer, checks=CHECKS)


def test_the_document_is_valid_openapi():
    validate(APP.openapi())
    assert len(OPERATIONS) > 40


@pytest.mark.parametrize("mode", list(GenerationMode), ids=lambda mode: mode.name)
@pytest.mark.parametrize("label", OPERATIONS)
def test_a_request_by_the_document_is_answered_by_it(client, ids, label, mode):
    if mode is GenerationMode.NEGATIVE and not takes_anything(label):
        pytest.skip("it takes nothing that could be wrong")

    @given(case=OPERATIONS[label].as_strategy(generation_mode=mode))
    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def ask(case: schemathesis.Case) -> None:
        if mode is GenerationMode.POSITIVE:
            case.body, case.path_parameters = living(case.body, ids), living(case.path_parameters, ids)
        check(case, send(client, case, **{"X-API-Key": KEY}))

    ask()


@pytest.mark.parametrize("label", OPERATIONS)
def test_without_a_key_nothing_is_told_but_that(client, ids, label):
    operation = OPERATIONS[label]
    path = operation.path
    for name in ids:
        path = path.replace("{" + name + "}", str(ids[name]))
    answers = [
        client.request(operation.method.upper(), path, headers=headers, json={})
        for headers in ({}, {"X-API-Key": KEY + "x"}, {"Authorization": "Bearer nobody"})
    ]
    if path in OPEN_PATHS:
        assert {answer.status_code for answer in answers} == {200}
    elif "/v1/" in path:
        assert {(one.status_code, "error" in one.json()) for one in answers} == {(401, True)}
    else:
        problems = [Problem.model_validate_json(answer.content) for answer in answers]
        assert {(one.status, one.code) for one in problems} == {(401, "unauthorised")}


def takes_anything(label: str) -> bool:
    operation = OPERATIONS[label]
    return bool(operation.body or operation.path_parameters or operation.query)
