"""/env/{env_name}/...: what an evaluation script of Crafter task apps does, step by step."""

import pytest

from task_app.dialects.one_call.request import legacy_calls
from task_app.environments.crafter.prompt import tool_spec
from task_app.environments.crafter.rules import ACTIONS
from task_app.plugins import default_plug_boards
from tests.task_app.counting import running_app

NAME = "/env/CrafterClassic"


async def started(client, name=NAME, **body):
    answer = await client.post(f"{name}/initialize", json={"seed": 17, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_an_evaluation_script_finds_its_way():
    async with running_app(default_plug_boards(), inference_url="http://vllm:8000/v1") as client:
        assert (await client.get("/health")).json()["healthy"]
        info = (await client.get("/info")).json()
        assert info["inference"]["base_url"] == "http://vllm:8000/v1", "the script asks it"
        tasks = (await client.get("/task_info", params={"seed": [17, 18]})).json()
        assert tasks[0]["rubric"] == {}, "an object, as the contract has it"
        assert tasks[0]["inference"]["inference_url"] == "http://vllm:8000/v1"
        assert tasks[0]["observation"]["player_position"] == [32, 32]
        assert [task["task_metadata"]["seed"] for task in tasks] == [17, 18]
        made = await started(client)
        env_id = made["env_id"]
        assert made["observation"]["inventory"]["health"] == 9
        assert made["observation"]["player_position"] == [32, 32]
        walk = [{"tool": "interact", "args": {"action": "move_right"}}] * 3
        action = {"tool_calls": [*walk, {"tool": "do"}]}
        answer = await client.post(f"{NAME}/step", json={"env_id": env_id, "action": action})
        assert answer.status_code == 200, answer.text
        assert answer.json()["info"]["achievements_added"] == ["collect_wood"], "docs/http.md, by other words"
        assert answer.json()["step_idx"] == 4
        assert answer.json()["observation"]["inventory"]["wood"] == 1
        assert answer.json()["observation"]["player_position"] == [35, 32]
        ended = await client.post(f"{NAME}/terminate", json={"env_id": env_id})
        assert ended.json() == {"ok": True}
        gone = await client.post(f"{NAME}/step", json={"env_id": env_id, "action": action})
    assert (gone.status_code, gone.json()["where"]) == (404, "env_id")


@pytest.mark.parametrize("body", [{"world_config": "hard"}, {"config": {"difficulty": "easy"}}])
async def test_a_difficulty_is_ignored_aloud(body):
    async with running_app(default_plug_boards()) as client:
        made, plain = await started(client, **body), await started(client)
    assert "difficulty is ignored" in made["warnings"][0]
    assert plain["warnings"] == []
    assert made["observation"] == plain["observation"]


async def test_a_session_answers_to_its_own_name_and_to_both_kinds_of_routes():
    async with running_app() as client:
        made = await started(client, "/env/counting")
        env_id = made["env_id"]
        call = {"tool": "add", "args": {"names": ["a"]}}
        body = {"env_id": env_id, "action": {"tool_calls": [call]}}
        named = await client.post("/env/counting/step", json=body)
        plain = await client.post("/env/step", json={"env_id": env_id, "tool_calls": [call]})
        assert [answer.json()["info"]["turn"] for answer in (named, plain)] == [1, 2]
        for name in ("other", "CrafterClassic"):
            answer = await client.post(f"/env/{name}/step", json=body)
            assert (answer.status_code, answer.json()["where"]) == (422, "env_name")


async def test_a_session_of_another_environment_is_not_found_under_this_name():
    crafter = default_plug_boards().environments["crafter"]
    boards = default_plug_boards()
    boards = type(boards)({"crafter": crafter, "twin": crafter}, boards.policies)
    async with running_app(boards) as client:
        made = await started(client, "/env/twin")
        answer = await client.post(f"{NAME}/terminate", json={"env_id": made["env_id"]})
    assert (answer.status_code, answer.json()["hint"]) == (404, "it is 'twin'")


@pytest.mark.parametrize(
    "action", [{}, {"tool_calls": "do"}, {"tool_calls": ["do"]}, {"tool_calls": [{"args": {}}]}]
)
async def test_an_action_of_no_known_form_is_refused_and_takes_no_step(action):
    async with running_app(default_plug_boards()) as client:
        env_id = (await started(client))["env_id"]
        answer = await client.post(f"{NAME}/step", json={"env_id": env_id, "action": action})
        assert (answer.status_code, answer.json()["where"].split(".")[0]) == (422, "action")
        after = await client.post(f"{NAME}/step", json={"env_id": env_id, "action": {"actions": ["noop"]}})
    assert after.json()["info"]["turn"] == 1


@pytest.mark.parametrize(
    ("action", "names"),
    [
        ({"actions": ["do", 1]}, ["do", "move_left"]),
        ({"actions": 5}, ["do"]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": 16}}]}, ["make_iron_sword"]),
        ({"tool_calls": [{"name": "interact", "arguments": {"actions": ["do"]}}]}, ["do"]),
        ({"tool_calls": [{"function": {"name": "sleep", "arguments": "{}"}}]}, ["sleep"]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": 17}}]}, [17]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": True}}]}, [True]),
    ],
)
def test_older_spellings_become_calls_of_the_tool_on_offer(action, names):
    assert legacy_calls(action, [tool_spec(8)]) == [{"tool": "interact_many", "args": {"actions": names}}]


def test_numbers_are_those_of_the_games_own_action_list():
    assert [ACTIONS[number] for number in (0, 5, 16)] == ["noop", "do", "make_iron_sword"]


def test_what_is_no_older_spelling_passes_as_it_is():
    calls = [{"tool": "interact_many", "args": {"actions": [5]}}, {"tool": "fly"}, {"tool": "interact"}]
    assert legacy_calls({"tool_calls": calls}, [tool_spec(8)]) == calls
