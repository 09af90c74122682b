"""/info and /task_info in both known shapes, and /openapi.json, which says of every route what it needs."""

import asyncio
from dataclasses import replace

import jsonschema
import pytest
from openapi_spec_validator import validate

from service_kit.errors import BodyTooLarge, NoKeyConfigured, RequestDeadline, TooSlow, Unauthorised
from shared_schemas.base import Body
from task_app.errors import TaskAppError
from task_app.plugins import EnvironmentPlugin
from task_app.routes.wire import ERRORS
from task_app.settings import Settings
from tests.task_app import counting
from tests.task_app.counting import CountingEnvironment, boards, openapi, running_app
from tests.task_app.slow import Gates, slow_boards


async def test_info_shows_the_service_its_limits_and_its_plug_ins():
    async with running_app(max_rollouts_per_request=77) as client:
        info = (await client.get("/info")).json()
    assert set(info) >= {"service", "dataset", "rubrics", "inference", "capabilities", "limits"}
    assert info["service"]["base_url"] == "http://task-app"
    assert "/env/create" in info["service"]["endpoints"]["env"]
    assert {"env", "policy", "rollout", "branch", "run"} <= set(info["service"]["endpoints"])
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


async def test_a_config_that_json_cannot_hold_is_described_all_the_same():
    class Odd(Body):
        bound: float = float("inf")
        word: str = "a\ud800"

    found = boards()
    odd = EnvironmentPlugin(Odd, lambda config: CountingEnvironment())
    found = replace(found, environments={**found.environments, "odd": odd})
    async with running_app(found) as client:
        properties = (await client.get("/info")).json()["environments"]["odd"]["properties"]
        taskset = (await client.get("/task_info", params={"env_name": "odd"})).json()["taskset"]
    assert {name: one["default"] for name, one in properties.items()} == {"bound": None, "word": "a?"}
    assert taskset["config"] == {"bound": None, "word": "a?"}


async def test_what_needs_a_package_that_is_not_installed_is_not_listed():
    there = boards()
    mine = replace(there.environments["counting"], needs="no_such_package")
    async with running_app(replace(there, environments={**there.environments, "mine": mine})) as client:
        info = (await client.get("/info")).json()
        assert info["environments"].keys() == there.environments.keys()
        assert "mine" not in info["capabilities"]["environments"]


async def test_every_endpoint_that_info_names_exists(client):
    info = (await client.get("/info")).json()
    paths = openapi().document["paths"]
    named = {path for group in info["service"]["endpoints"].values() for path in group}
    assert named == set(paths)


async def test_task_info_without_a_seed_describes_the_set(client):
    taskset = (await client.get("/task_info")).json()["taskset"]
    assert (taskset["id"], taskset["seed_range"]) == ("counting_procedural", [0, 2**31 - 2])
    assert taskset["config"] == {"length": 1_000}


async def test_a_task_has_the_fields_that_clients_of_older_task_apps_require(client):
    # TaskInfo of synth-ai 0.2.16: of these types, none of them null; `seed` or none.
    required = {
        "task": dict, "environment": str, "dataset": dict, "rubric": dict, "inference": dict, "limits": dict
    }  # fmt: skip
    for params in ({"seed": 4}, {}):
        task = (await client.get("/task_info", params=params)).json()
        assert {name: type(task[name]) for name in required} == required
        assert (task["task"]["id"], task["task"]["name"]) == ("counting", "counting")


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
            ({"env_name": "nope"}, "env_name"),
            ({"seed": [1, 2, 3]}, "seed"),
        ):
            answer = await client.get("/task_info", params=params)
            assert (answer.status_code, answer.json()["where"]) == (422, where)


async def test_an_environment_name_is_looked_up_in_the_boards_of_this_service(client):
    answer = await client.get("/task_info", params={"env_name": "crafter"})
    assert "known: counting" in answer.json()["detail"]


async def test_a_host_header_that_names_none_is_not_repeated(client):
    for host in ("[::1]evil.example", "[::1", "a@b", "a/b", "x:99999999", "a\\b"):
        for path in ("/info", "/health", "/openenv/counting/openapi.json")[: 3 if host == "a@b" else 1]:
            answer = await client.get(path, headers={"Host": host})
            assert answer.status_code == 200, answer.text
            assert host not in answer.text
        assert (await client.get("/nope", headers={"Host": host})).status_code == 404


META = jsonschema.Draft202012Validator(jsonschema.Draft202012Validator.META_SCHEMA)


@pytest.fixture
def document():
    return counting.openapi().document


async def test_the_document_is_served_and_that_of_openenv_is_valid(client, document):
    assert (await client.get("/openapi.json")).json() == document
    validate((await client.get("/openenv/counting/openapi.json")).json())


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
