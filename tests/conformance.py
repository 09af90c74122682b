"""Requests made from an OpenAPI document: no 5xx, every error the one shape, every answer as declared.

More of them with SCHEMATHESIS_EXAMPLES=200.
"""

import os
from collections.abc import Callable, Collection, Mapping
from typing import Any

from starlette.testclient import TestClient

from shared_schemas.problem import PROBLEM_MEDIA_TYPE, Problem

EXAMPLES = int(os.environ.get("SCHEMATHESIS_EXAMPLES", "3"))
Ids = Mapping[str, Any]


class Conformance:
    """The operations of a service.

    schemathesis is imported where it is used: every test process collects this, and one runs it.
    Random ids lead nowhere, so the ids of living things are put where an id may stand.

    Args:
        ids: makes something that lives, of every kind that a request may name.
        key: of the service; `open_paths` need none.
    """

    def __init__(
        self,
        client: TestClient,
        document: dict[str, Any],
        *,
        ids: Callable[[], Ids],
        key: str,
        open_paths: Collection[str],
    ) -> None:
        import schemathesis

        self._client = client
        self._ids = ids
        self._key = key
        self._open_paths = open_paths
        schema = schemathesis.openapi.from_dict(document)
        self._operations = [one.ok() for one in schema.get_all_operations()]
        assert len(self._operations) > 15

    def send_valid(self) -> None:
        """What the document allows, to living things."""
        from schemathesis.generation import GenerationMode

        for operation in self._operations:
            self._send(operation, GenerationMode.POSITIVE, self._ids())

    def send_invalid(self) -> None:
        """What the document forbids, to each operation that takes anything."""
        from schemathesis.generation import GenerationMode

        for operation in self._operations:
            if operation.body or operation.path_parameters or operation.query:
                self._send(operation, GenerationMode.NEGATIVE, {})

    def _send(self, operation: Any, mode: Any, ids: Ids) -> None:
        from hypothesis import HealthCheck, Phase, given, settings

        @given(case=operation.as_strategy(generation_mode=mode))
        @settings(
            max_examples=EXAMPLES,
            deadline=None,
            database=None,
            derandomize=True,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        def ask(case: Any) -> None:
            case.body = _name_living(case.body, ids)
            case.path_parameters = _name_living(case.path_parameters, ids)
            self._check(case)

        try:
            ask()
        except Exception as error:
            error.add_note(operation.label)
            raise

    def _check(self, case: Any) -> None:
        from schemathesis.checks import not_a_server_error
        from schemathesis.specs.openapi import checks

        sent = case.as_transport_kwargs(base_url="http://testserver")
        known = {name: sent[name] for name in ("method", "url", "params", "json") if name in sent}
        made_up = {name: value.encode("latin-1", "replace") for name, value in dict(sent["headers"]).items()}
        headers = {**made_up, "X-API-Key": self._key.encode()}
        answer = self._client.request(**known, content=sent.get("data"), headers=headers)
        # Model calls of agents are refused in the form of their own clients.
        speaks_a_dialect = "/{capture_id}/v1/" in case.path and answer.status_code in (400, 404)
        if answer.status_code >= 400 and answer.request.method != "HEAD" and not speaks_a_dialect:
            assert answer.headers["content-type"] == PROBLEM_MEDIA_TYPE, answer.text
            assert Problem.model_validate_json(answer.content).status == answer.status_code
        declared = [
            not_a_server_error, checks.status_code_conformance, checks.content_type_conformance,
            checks.response_schema_conformance,
        ]  # fmt: skip
        # schemathesis reads the schema of a stream as that of each event.
        is_stream = answer.headers.get("content-type", "").startswith("text/event-stream")
        case.validate_response(answer, checks=declared[:-1] if is_stream else declared)

    def refuse_without_key(self) -> None:
        """Without the key, or with another one, nothing is told but that."""
        ids = self._ids()
        wrong = ({}, {"X-API-Key": self._key + "x"}, {"Authorization": "Bearer nobody"})
        for operation in self._operations:
            method, path = operation.method.upper(), operation.path.format_map(_Named(ids))
            answers = [self._client.request(method, path, headers=headers, content="{}") for headers in wrong]
            if path in self._open_paths:
                assert {answer.status_code for answer in answers} == {200}, operation.label
            elif "/v1/" in path:
                told = {(one.status_code, "error" in one.json()) for one in answers}
                assert told == {(401, True)}, operation.label
            else:
                problems = [Problem.model_validate_json(answer.content) for answer in answers]
                told = {(one.status, one.code) for one in problems}
                assert told == {(401, "unauthorised")}, operation.label


class ConformanceTests:
    """The tests of a service, whose module has the fixture `conformance`."""

    def test_what_the_document_allows_is_answered_by_it(self, conformance: Conformance):
        conformance.send_valid()

    def test_what_the_document_forbids_is_refused_by_it(self, conformance: Conformance):
        conformance.send_invalid()

    def test_without_a_key_nothing_is_told_but_that(self, conformance: Conformance):
        conformance.refuse_without_key()


class _Named(dict[str, Any]):
    """The ids of living things; the name itself where nothing of that kind lives."""

    def __missing__(self, name: str) -> str:
        return name


def _name_living(value: Any, ids: Ids) -> Any:
    """The same data with what lives in the places that name it."""
    if isinstance(value, dict):
        return {name: ids.get(name, _name_living(one, ids)) for name, one in value.items()}
    return [_name_living(one, ids) for one in value] if isinstance(value, list) else value
