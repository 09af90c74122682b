"""Requests made from the task app's OpenAPI document, for every route."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from starlette.testclient import TestClient

from task_app.app import OPEN_PATHS, create_app
from task_app.plugins import InteractionEntry
from task_app.settings import Settings
from tests.conformance import Conformance, ConformanceTests
from tests.task_app.counting import KEY, boards, rollout
from tests.task_app.interactions.users import Noted

NAMES = {"env_name": "counting", "policy_name": "planned", "seed": 3}


@pytest.fixture(scope="module")
def conformance() -> Iterator[Conformance]:
    noted = InteractionEntry("noted", Noted, {})
    app = create_app(
        Settings(api_keys=(KEY,), max_wait_s=0.0), boards=replace(boards(), interactions={"noted": noted})
    )
    with TestClient(app, raise_server_exceptions=False) as client:
        yield Conformance(client, app.openapi(), ids=lambda: living(client), key=KEY, open_paths=OPEN_PATHS)


def living(client: TestClient) -> dict[str, Any]:
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


class TestOfTheTaskApp(ConformanceTests):
    """The three tests with `conformance`."""
