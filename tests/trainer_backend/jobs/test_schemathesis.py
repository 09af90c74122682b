"""Requests made from the trainer service's OpenAPI document, for every route."""

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from tests.conformance import Conformance, ConformanceTests
from tests.trainer_backend.jobs.served import acted, checks, openapi, settings_for
from trainer_backend.jobs.app import OPEN_PATHS, create_app
from trainer_backend.jobs.server import open_service

KEY = "a-key"


@pytest.fixture(scope="module")
def conformance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Conformance]:
    settings = settings_for(tmp_path_factory.mktemp("runs"), environ={"TRAINER_API_KEY": KEY})
    with (
        open_service(settings, checks(), command=acted) as service,
        TestClient(create_app(service), raise_server_exceptions=False) as client,
    ):
        yield Conformance(
            client,
            openapi().document,
            ids=lambda: {"job_id": end_job(client)},
            key=KEY,
            open_paths=OPEN_PATHS,
        )


def end_job(client: TestClient) -> str:
    """An ended job: of one that lives, a stream would not end."""
    body = '[job]\nname = "quick"\n[model]\npreset = "tiny-0.3m"\n'
    found = client.post("/jobs", content=body, headers={"X-API-Key": KEY}).json()["id"]
    client.post(f"/jobs/{found}/cancel", headers={"X-API-Key": KEY})
    client.get(f"/jobs/{found}/events", headers={"X-API-Key": KEY})
    return str(found)


class TestOfTheTrainer(ConformanceTests):
    """The three tests with `conformance`."""
