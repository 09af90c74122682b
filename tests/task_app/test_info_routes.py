"""/info and /task_info in both known shapes, and /openapi.json, which says of every route what it needs."""

import asyncio
from dataclasses import replace

from openapi_spec_validator import validate

from service_kit.errors import BodyTooLarge, NoKeyConfigured, RequestDeadline, TooSlow, Unauthorised
from shared_schemas.base import Body
from task_app.errors import TaskAppError
from task_app.plugins import EnvironmentPlugin
from task_app.routes.wire import ERRORS
from task_app.settings import Settings
from tests.task_app.counting import CountingEnvironment, boards, openapi, running_app
from tests.task_app.slow import Gates, slow_boards


async def test_info_shows_the_service_its_limits_and_its_plug_ins():
    async with running_app(max_rollouts_per_request=77) as client:
        info = (await client.get("/info")).json()
    assert set(info) >= {"service", "dataset", "rubrics", "inference", "capabilities", "limits"}
    assert info["service"]["base_url"] == "http://task-app"
    endpoints = info["service"]["endpoints"]
    assert {"env", "policy", "rollout", "branch", "run"} <= set(endpoints)
    assert {path for group in endpoints.values() for path in group} == set(openapi().document["paths"])
    assert "base_url" in info["inference"]
    assert info["limits"]["max_rollouts_per_request"] == 77
    hidden = {"api_keys", "state_dir", "interaction_config_path", "mcp_servers"}
    hidden |= {"host", "port", "plugins", "replicas", "exit_with_parent"}
    hidden |= {"verifiers_python", "textarena_python", "reasoning_gym_python"}
    assert set(info["limits"]) == set(Settings.model_fields) - hidden
    assert info["environments"]["counting"]["properties"]["length"]["default"] == 1_000
    assert info["capabilities"]["policies"] == ["openai", "planned"]
    textarena = info["environment_prefixes"]["textarena"]
    assert textarena["env_name"] == "textarena:ID" and "game" in textarena["config"]["properties"]
    assert "TURNWISE_TEXTARENA_PYTHON" in textarena["how"]


async def test_a_config_that_json_cannot_hold_is_described_and_what_misses_a_package_is_not_listed():
    class Odd(Body):
        bound: float = float("inf")
        word: str = "a\ud800"

    there = boards()
    odd = EnvironmentPlugin(Odd, lambda config: CountingEnvironment())
    mine = replace(there.environments["counting"], needs="no_such_package")
    environments = {**there.environments, "odd": odd, "mine": mine}
    async with running_app(replace(there, environments=environments)) as client:
        info = (await client.get("/info")).json()
        taskset = (await client.get("/task_info", params={"env_name": "odd"})).json()["taskset"]
    properties = info["environments"]["odd"]["properties"]
    assert {name: one["default"] for name, one in properties.items()} == {"bound": None, "word": "a?"}
    assert taskset["config"] == {"bound": None, "word": "a?"}
    assert info["environments"].keys() == environments.keys() - {"mine"}
    assert "mine" not in info["capabilities"]["environments"]


async def test_a_task_has_the_fields_that_clients_of_older_task_apps_require(client):
    # TaskInfo of synth-ai 0.2.16: of these types, none of them null; `seed` or none.
    required = {
        "task": dict, "environment": str, "dataset": dict, "rubric": dict, "inference": dict, "limits": dict
    }  # fmt: skip
    for params in ({"seed": 4}, {}):
        task = (await client.get("/task_info", params=params)).json()
        assert {name: type(task[name]) for name in required} == required
        assert (task["task"]["id"], task["task"]["name"]) == ("counting", "counting")
    taskset = task["taskset"]
    assert (taskset["id"], taskset["seed_range"]) == ("counting_procedural", [0, 2**31 - 2])
    assert taskset["config"] == {"length": 1_000}, "without a seed the set is described"


async def test_one_seed_gives_a_task_and_several_a_list(client):
    one = (await client.get("/task_info", params={"seed": 4})).json()
    several = (await client.get("/task_info", params={"seed": [4, 5], "seeds": [6]})).json()
    assert (one["dataset"]["seed"], one["environment"], one["observation"]["text"]) == (
        4,
        "counting",
        "step 0",
    )
    assert [task["dataset"]["seed"] for task in several] == [4, 5, 6]


async def test_a_task_whose_world_hangs_is_counted_among_the_plug_ins_that_do():
    gates = Gates()
    gates.reset.clear()
    async with running_app(slow_boards(gates), plugin_stuck_after_s=0.01, max_plugin_threads=1) as client:
        params = {"env_name": "slow", "seed": 1}
        hanging = asyncio.create_task(client.get("/task_info", params=params))
        while client._transport.app.state.services.threads.stuck_count == 0:
            await asyncio.sleep(0)
            assert not hanging.done()
        refused = await client.get("/task_info", params=params)
        gates.reset.set()
        assert (await hanging).status_code == 200
    assert (refused.status_code, refused.json()["code"]) == (429, "capacity_reached")


async def test_bad_questions_are_named():
    async with running_app(max_seeds_per_request=2) as client:
        for params, where in (
            ({"seed": -1}, "seed.0"),
            ({"seed": "x"}, "seed.0"),
            ({"env_name": "crafter"}, "env_name"),
            ({"seed": [1, 2, 3]}, "seed"),
        ):
            answer = await client.get("/task_info", params=params)
            assert (answer.status_code, answer.json()["where"]) == (422, where)
            assert where != "env_name" or "known: counting" in answer.json()["detail"]


async def test_a_host_header_that_names_none_is_not_repeated(client):
    for host in ("[::1]evil.example", "[::1", "a@b", "a/b", "x:99999999", "a\\b"):
        for path in ("/info", "/health", "/openenv/counting/openapi.json")[: 3 if host == "a@b" else 1]:
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == 200, answer.text
            assert host not in answer.text
        assert (await client.get("/nope", headers={"Host": host})).status_code == 404


async def test_the_document_is_served_and_that_of_openenv_is_valid(client):
    assert (await client.get("/openapi.json")).json() == openapi().document
    validate((await client.get("/openenv/counting/openapi.json")).json())


def test_every_operation_has_a_sentence_a_key_and_every_error_that_a_route_can_answer():
    edge = {Unauthorised, BodyTooLarge, TooSlow, NoKeyConfigured, RequestDeadline}
    statuses = {kind.status for kind in {*TaskAppError.tree(), *edge}}
    assert set(ERRORS) == statuses
    for label, operation in openapi().operations():
        assert operation.get("summary") or operation.get("description"), label
        assert bool(operation["security"]) == (label not in ("GET /", "GET /health")), label
        assert {str(status) for status in statuses} <= set(operation["responses"]), label
        assert list(operation["responses"]["422"]["content"]) == ["application/problem+json"]
