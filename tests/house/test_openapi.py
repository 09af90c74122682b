"""What /openapi.json of both services promises to generated clients; docs/http.md tells how to make one."""

import pytest
from openapi_spec_validator import validate

from tests.task_app import counting
from tests.trainer_backend.jobs import served

DOCUMENTS = {"task app": counting.openapi, "trainer": served.openapi}


@pytest.fixture(params=DOCUMENTS)
def document(request):
    return DOCUMENTS[request.param]()


def test_it_is_an_openapi_document(document):
    validate(document.document)


def test_every_reply_has_a_type(document):
    # A reply of JSON names a model: `response_model`, where the route returns a Response of its own.
    assert list(document.untyped_replies()) == []


def test_every_operation_is_named_by_its_function_and_by_no_other_one(document):
    names = [operation["operationId"] for _, operation in document.operations()]
    assert len(set(names)) == len(names)
    # FastAPI's own names end with the path and the method, as in show_job_jobs__job_id__get.
    assert [name for name in names if "__" in name or name.endswith(("_get", "_post", "_delete"))] == []
