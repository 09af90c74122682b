"""Jobs in the shape that launchers of other backends send."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import tomli

from tests.trainer_backend.api.served import Served, serving, settings_for


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
async def open_to_launchers(tmp_path: Path) -> AsyncIterator[Served]:
    """A service that allows what launchers name."""
    settings = settings_for(tmp_path, task_urls=("http://127.0.0.1:8001",), models=("Qwen/*",))
    async with serving(settings) as found:
        yield found


async def test_a_launchers_job_is_ours_with_its_keys_translated(open_to_launchers):
    served = open_to_launchers
    body = {
        "job_type": "rl",
        "compute": {"gpu_type": "H100"},
        "data": {
            "endpoint_base_url": "http://127.0.0.1:8001",
            "base_model": "Qwen/Qwen3-0.6B",
            "config": {
                "job": {"name": "waiting"},
                "algorithm": {"type": "online", "method": "policy_gradient", "variety": "gspo"},
                "model": {"base": "Qwen/Qwen3-0.6B", "trainer_mode": "full", "label": "x"},
                "training": {"num_epochs": 2, "iterations_per_epoch": 5, "group_size": 4},
                "judge": {},
            },
        },
        "tags": {"source": "cli"},
        "client": "1.2",
    }
    answer = await served.client.post("/rl/jobs", json=body, headers={"Idempotency-Key": "launch"})
    job = answer.json()
    assert (answer.status_code, job["job_id"], job["status"]) == (201, job["id"], "queued")
    config = tomli.loads((await served.client.get(f"/jobs/{job['id']}/config")).text)
    assert config["training"]["iterations"] == 10
    assert config["model"]["name"] == "Qwen/Qwen3-0.6B"
    assert config["services"]["task_url"] == ["http://127.0.0.1:8001"]
    assert set(job["warnings"]) == {
        "client is not read",
        "compute is for other backends and is not read",
        "algorithm.type is for other backends and is not read",
        "algorithm.method is for other backends and is not read",
        "algorithm.variety is for other backends and is not read",
        "model.trainer_mode is for other backends and is not read",
        "model.label is for other backends and is not read",
        "[judge] is for other backends and is not read",
    }
    again = await served.client.post("/api/rl/jobs", json=body, headers={"Idempotency-Key": "launch"})
    assert (again.status_code, again.json()["job_id"]) == (200, job["id"])


@pytest.mark.parametrize(
    ("body", "status", "told"),
    [
        ({"job_type": "sft", "data": {"config": {}}}, 422, "job_type"),
        ({"job_type": "rl"}, 422, "data"),
        ({"job_type": "rl", "data": {"config": "[x"}}, 400, "not valid TOML"),
        ({"job_type": "rl", "data": {"config": {}, "model": "a/b"}, "tags": {"a": []}}, 422, "tags"),
        (
            {"job_type": "rl", "data": {"config": {"model": {"base": "a/b"}}, "model": "c/d"}},
            400,
            "two models",
        ),
        ({"job_type": "rl", "data": {"config": {"training": {"num_epochs": "x"}}}}, 400, "whole numbers"),
        (
            {"job_type": "rl", "data": {"config": {}, "model": "a/b", "endpoint_base_url": "http://far"}},
            400,
            "--allow-task-url",
        ),
        (
            {"job_type": "rl", "data": {"config": {"model": {"base": nested(900)}}}},
            400,
            "more than 32 deep",
        ),
    ],
)
async def test_a_launchers_mistakes_are_told(served, body, status, told):
    answer = await served.client.post("/rl/jobs", json=body)
    assert answer.status_code == status and told in answer.json()["detail"], answer.text
