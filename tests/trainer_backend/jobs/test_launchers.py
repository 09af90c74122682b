"""Jobs in the shape that launchers of other backends send."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tomli

from tests.conftest import TASK_APP_KEY, task_app
from tests.trainer_backend.jobs.served import Served, serving, settings_for
from trainer_backend.jobs.launcher import translate

# Nothing listens there.
AWAY = "http://127.0.0.1:9"


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
async def open_to_launchers(tmp_path: Path) -> AsyncIterator[Served]:
    """A service that allows what launchers name."""
    settings = settings_for(tmp_path, task_urls=(AWAY,), models=("Qwen/*",))
    async with serving(settings) as found:
        yield found


async def test_a_launchers_job_is_ours_with_its_keys_translated(open_to_launchers, monkeypatch):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", "k")
    served = open_to_launchers
    body = {
        "job_type": "rl",
        "compute": {"gpu_type": "H100"},
        "data": {
            "endpoint_base_url": AWAY,
            "base_model": "Qwen/Qwen3-0.6B",
            "config": {
                "job": {"name": "waiting"},
                "services": {"task_url": AWAY},
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
    assert config["services"]["task_url"] == [AWAY]
    away = job["warnings"].pop()
    assert "could not be tried at its task app now: no task app answers" in away
    of_others = (
        *("compute", "algorithm.type", "algorithm.method", "algorithm.variety", "model.trainer_mode"),
        "model.label",
    )
    assert set(job["warnings"]) == {
        "client is not read",
        *(f"{name} is for other backends and is not read" for name in of_others),
        "[judge] is for other backends and is not read; here it is rollout.reward_function",
    }
    again = await served.client.post("/api/rl/jobs", json=body, headers={"Idempotency-Key": "launch"})
    assert (again.status_code, again.json()["job_id"]) == (200, job["id"])
    shown = (await served.client.get(f"/api/rl/jobs/{job['id']}")).json()
    assert (shown["job_id"], shown["status"]) == (job["id"], shown["state"])
    unknown = await served.client.get("/rl/jobs/unknown")
    assert (unknown.status_code, unknown.json()["code"]) == (404, "job_unknown")


async def test_a_launchers_job_is_tried_at_its_task_app_before_it_is_queued(tmp_path, monkeypatch):
    """Of the shape of the ancestor's crafter_rl_stepwise_simple.toml."""
    monkeypatch.setenv("ENVIRONMENT_API_KEY", TASK_APP_KEY.get_secret_value())
    url = task_app()
    settings = settings_for(tmp_path / "data", task_urls=(url,), models=("Qwen/*",))
    async with serving(settings) as served:

        async def post(rollout: dict[str, Any], dry_run: bool = False) -> httpx.Response:
            config = {
                "model": {"base": "Qwen/Qwen3-0.6B"},
                "rollout": {"max_turns": 10, "episodes_per_batch": 64, **rollout},
            }
            body = {"job_type": "rl", "data": {"endpoint_base_url": url, "config": config}}
            return await served.client.post("/rl/jobs", json=body, params={"dry_run": dry_run})

        ancestors = {"env_name": "CrafterClassic", "policy_name": "crafter-react"}
        dry = await post(ancestors, dry_run=True)
        assert (dry.status_code, dry.json()["warnings"]) == (200, [])
        assert tomli.loads(dry.json()["toml"])["rollout"]["policy_name"] == "crafter-react"
        for rollout, dry_run, where in (
            ({"env_name": "Sokoban"}, False, "rollout.env_name"),
            ({"policy_name": "crafter-act"}, False, "rollout.policy_name"),
            ({"env_config": {"lenght": 9}}, True, "rollout.env_config.lenght"),
        ):
            refused = await post(rollout, dry_run)
            assert (refused.status_code, refused.json()["where"]) == (400, where), refused.text
        assert (await served.client.get("/jobs")).json()["jobs"] == [], "nothing was made of any of these"
        assert (await post(ancestors)).status_code == 201
        ours = {"endpoint_base_url": url}
        good = (await served.client.post("/api/rl/verify_task_app", json=ours)).json()
        monkeypatch.setenv("ENVIRONMENT_API_KEY", "zebra-quagga")
        bad = (await served.client.post("/rl/verify_task_app", json=ours)).json()
        elsewhere = {"endpoint_base_url": "http://127.0.0.1:9"}
        other = await served.client.post("/rl/verify_task_app", json=elsewhere)
    assert good == {"any_ok": True, "attempts": [{"url": url, "status": 200, "detail": None}]}
    assert (bad["any_ok"], bad["attempts"][0]["status"]) == (False, None)
    assert "401" in bad["attempts"][0]["detail"] and "zebra" not in str(bad)
    assert other.status_code == 400 and "--allow-task-url" in other.json()["detail"]


def test_published_keys_stand_where_ours_do():
    config = {
        "type": "rl",
        "lora": {"r": 16, "alpha": 32},
        "rollout": {
            "env_config": {
                "difficulty": "easy",
                "length": 100,
                "step_rewards": {"enabled": True, "mode": "decision_stepwise", "strategy": "consistent"},
            },
            "policy_config": {"temperature": 0.2, "max_tokens": 512, "max_attempts": 3},
        },
        "training": {"step_rewards_enabled": True, "step_rewards_strategy": "simple", "max_turns": 10},
    }
    tables, warnings = translate(config, task_url=None, model=None)
    assert tables == {
        "lora": {"rank": 16, "alpha": 32},
        "rollout": {
            "env_config": {"length": 100},
            "policy_config": {"max_attempts": 3},
            "temperature": 0.2,
            "max_tokens": 512,
        },
        "training": {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"},
        "model": {},
    }
    named = [told.partition(" ")[0] for told in warnings]
    assert named == ["training.max_turns", "rollout.env_config.difficulty"]


MISTAKES = [
    ({"type": "sft"}, {}, "jobs for 'rl' alone"),
    ({"training": {"step_rewards_strategy": "per_achievement"}}, {}, "strategy is 'per_achievement'"),
    ({"training": {"step_rewards_strategy": ["simple"]}}, {}, "step_rewards_strategy is ['simple']"),
    ({"lora": {"r": 8, "rank": 16}}, {}, "lora.r is 8, but lora.rank is 16"),
    ("[x", {}, "not valid TOML"),
    ({"model": {"base": "a/b"}}, {"model": "c/d"}, "two models"),
    ({"training": {"num_epochs": "x"}}, {}, "whole numbers"),
    ({}, {"model": "a/b", "endpoint_base_url": "http://far"}, "--allow-task-url"),
    ({"model": {"base": nested(100)}}, {}, "more than 32 deep"),
]


async def test_a_launchers_mistakes_are_told(served):
    for config, more, told in MISTAKES:
        body = {"job_type": "rl", "data": {"config": config, **more}}
        answer = await served.client.post("/rl/jobs", json=body)
        assert answer.status_code == 400 and told in answer.json()["detail"], answer.text
    answer = await served.client.post("/rl/jobs", json=body | {"tags": {"a": []}})
    assert answer.status_code == 422 and "tags" in answer.json()["detail"]
