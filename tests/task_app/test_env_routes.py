"""/env: an environment that the caller steps itself."""

import asyncio
import re

import pytest

from task_app.plugins import default_plug_boards
from task_app.sessions.sessions import EnvironmentSession
from tests.task_app.counting import CountingEnvironment, running_app

ON = {"enabled": True, "mode": "decision_stepwise"}
# The same in the words of source 1, as a job's [training] has them.
TRAINING = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}


def calls(*names):
    return [{"tool": "add", "args": {"names": list(names)}}]


async def created(client, **body):
    answer = await client.post("/env/create", json={"env_name": "counting", "seed": 3, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


async def stepped(client, env_id, tool_calls):
    return await client.post("/env/step", json={"env_id": env_id, "tool_calls": tool_calls})


async def test_create_shows_the_first_observation_and_the_tools():
    async with running_app() as client:
        made = await created(client)
    assert made["step_idx"] == 0
    assert made["info"]["seed"] == 3
    assert made["info"]["tools"][0]["function"]["name"] == "add"
    assert made["observation"] == {
        "text": "step 0",
        "data": {"step": 0},
        "achievements_status": {"a": False, "b": False},
        "achievements_counts": {"a": 0, "b": 0},
        "reward_last_step": 0.0,
    }


@pytest.mark.parametrize("last", ["b", "boom"])
async def test_nothing_is_left_of_an_environment_that_is_terminated(last, live):
    async with running_app() as client:
        env_id = (await created(client))["env_id"]
        for name in ("a", last):
            await stepped(client, env_id, calls(name))
        assert live.count(EnvironmentSession) == 1
        assert (await client.post("/env/terminate", json={"env_id": env_id})).status_code == 200
        await live.until_gone(CountingEnvironment)
        await live.until_gone(EnvironmentSession)


async def test_a_step_carries_what_the_design_says():
    async with running_app() as client:
        made = await created(client, config={"step_rewards": ON})
        await stepped(client, made["env_id"], calls("a"))
        answer = (await stepped(client, made["env_id"], calls("a", "b", "x"))).json()
    assert answer.pop("observation")["achievements_counts"] == {"a": 2, "b": 1}
    assert answer == {
        "reward": 1.0,
        "env_rewards": [0.0, 1.0, 0.0],
        "reward_parts": [],
        "done": False,
        "terminated": False,
        "truncated": False,
        "step_idx": 4,
        "info": {
            "turn": 2,
            "achievements_added": ["b"],
            "invalid_reason": None,
            "executed_actions": ["a", "b", "x"],
            "tool_result": "did 3",
        },
        "metadata": {
            "decision_rewards": {
                "turn": 2, "ach_delta": 2, "unique_delta": 1, "all": ["a", "b"], "unique": ["b"]
            }
        },
    }  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/env/create", {"training": TRAINING}),
        ("/env/create", {"config": {"training": TRAINING}}),
        ("/env/create", {"training": TRAINING, "config": {"step_rewards": ON}}),
        ("/env/counting/initialize", {"training": TRAINING}),
        ("/env/create", {"rollout": TRAINING}),
        ("/env/create", {"rollout": {**TRAINING, "episodes": 2}, "training": TRAINING}),
        ("/env/create", {"config": {"rollout": TRAINING}}),
        ("/env/counting/initialize", {"rollout": TRAINING}),
    ],
)
async def test_the_published_switches_act_in_a_training_or_a_rollout_table(path, body):
    async with running_app() as client:
        made = await client.post(path, json={"env_name": "counting", **body})
        assert made.status_code == 200, made.text
        answer = (await stepped(client, made.json()["env_id"], calls("a"))).json()
    assert answer["metadata"]["decision_rewards"]["unique"] == ["a"]


@pytest.mark.parametrize("path", ["/env/create", "/policy/create"])
async def test_a_rollout_table_must_agree_and_without_our_names_it_is_left_alone(path):
    async with running_app() as client:
        body = {"env_name": "counting", "policy_name": "planned"}
        if path == "/env/create":
            body.pop("policy_name")
        differ = {"training": {"step_rewards_enabled": False}, "rollout": TRAINING}
        other = await client.post(path, json=body | differ)
        wrong = await client.post(path, json=body | {"rollout": {"step_rewards_mode": "x"}})
        alone = await client.post(path, json=body | {"rollout": {"episodes": 2}})
    assert (other.status_code, other.json()["where"]) == (422, "rollout")
    assert (wrong.status_code, wrong.json()["where"]) == (422, "rollout.step_rewards_mode")
    assert alone.status_code == 200, alone.text


async def test_openai_tool_calls_are_taken_as_they_come():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"names": ["a"]}'}}
    async with running_app() as client:
        made = await created(client)
        answer = (await stepped(client, made["env_id"], [call, *calls("b")])).json()
    assert answer["info"]["executed_actions"] == ["a", "b"]


@pytest.mark.parametrize("tool_calls", [[], [{"tool": "sub", "args": {}}], [{"tool": "add", "args": "{"}]])
async def test_a_refused_call_runs_one_noop_and_says_why(tool_calls):
    async with running_app() as client:
        made = await created(client)
        answer = await stepped(client, made["env_id"], tool_calls)
    assert answer.status_code == 200
    assert answer.json()["info"]["invalid_reason"]
    assert (answer.json()["step_idx"], answer.json()["info"]["executed_actions"]) == (1, ["noop"])


async def test_a_step_after_the_end_is_a_conflict_and_a_reset_starts_again():
    async with running_app() as client:
        made = await created(client)
        ended = (await stepped(client, made["env_id"], calls("a", "end", "b"))).json()
        assert (ended["done"], ended["terminated"], ended["step_idx"]) == (True, True, 2)
        after = await stepped(client, made["env_id"], calls("a"))
        assert (after.status_code, after.json()["code"]) == (409, "episode_over")
        again = (await client.post("/env/reset", json={"env_id": made["env_id"]})).json()
        assert (again["step_idx"], again["info"]["seed"]) == (0, 3)
        other = await client.post("/env/reset", json={"env_id": made["env_id"], "seed": 9})
        assert other.json()["info"]["seed"] == 9
        assert (await stepped(client, made["env_id"], calls("a"))).json()["info"]["turn"] == 1


async def test_an_unknown_or_terminated_id_is_a_404():
    async with running_app() as client:
        made = await created(client)
        assert (await client.post("/env/terminate", json={"env_id": made["env_id"]})).json() == {"ok": True}
        for path in ("reset", "step", "terminate"):
            body = {"env_id": made["env_id"], "tool_calls": []}
            answer = await client.post(f"/env/{path}", json=body)
            assert (answer.status_code, answer.json()["code"]) == (404, "unknown_id")
            assert answer.json()["where"] == "env_id"


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"env_name": "countin"}, "env_name"),
        ({"seed": -1}, "seed"),
        ({"seed": 2**31 - 1}, "seed"),
        ({"seed": "soon"}, "seed"),
        ({"seed": 1.5}, "seed"),
        ({"seed": 7.0}, "seed"),
        ({"seed": "7"}, "seed"),
        ({"seed": False}, "seed"),
        ({"sed": 7}, "sed"),
        ({"seeds": [7]}, "seeds"),
        ({"confg": {}}, "confg"),
        ({"env_name": "x" * 201}, "env_name"),
        ({"config": {"length": "long"}}, "config.length"),
        ({"config": {"step_rewards": {"enable": True}}}, "config.step_rewards.enable"),
        ({"training": {"step_rewards_enable": True}}, "training.step_rewards_enable"),
        ({"training": {"step_rewards_mode": "stepwise"}}, "training.step_rewards_mode"),
        ({"training": {"step_rewards_beta": -1}}, "training.step_rewards_beta"),
        ({"training": {"group_size": 8}}, "training.group_size"),
        ({"training": True}, "training"),
        ({"config": {"training": {"event_rewards_kind": "all"}}}, "config.training.event_rewards_kind"),
        ({"training": TRAINING, "config": {"step_rewards": {}}}, "training"),
        ({"step_rewards_enabled": True}, "step_rewards_enabled"),
        ({"step_rewards": ON}, "step_rewards"),
        ({"config": TRAINING}, "config.step_rewards_enabled"),
        ({"config": {"step_rewards": TRAINING}}, "config.step_rewards.step_rewards_enabled"),
        ({"rollouts": TRAINING}, "rollouts"),
    ],
)
async def test_what_is_wrong_with_a_create_is_named(changes, where):
    async with running_app() as client:
        answer = await client.post("/env/create", json={"env_name": "counting", **changes})
    assert (answer.status_code, answer.json()["where"]) == (422, where)


async def test_a_decision_has_a_bounded_number_of_calls_and_each_names_a_tool():
    async with running_app(max_calls_per_step=2) as client:
        made = await created(client)
        for tool_calls in (calls("a") * 3, [{"args": {}}]):
            answer = await stepped(client, made["env_id"], tool_calls)
            assert (answer.status_code, answer.json()["where"]) == (422, "tool_calls")
        assert (await stepped(client, made["env_id"], calls("a"))).json()["info"]["turn"] == 1


async def test_a_broken_environment_is_named_with_file_and_line():
    async with running_app() as client:
        made = await created(client)
        answer = await stepped(client, made["env_id"], calls("boom"))
    assert (answer.status_code, answer.json()["code"]) == (424, "critical_error")
    assert re.fullmatch(
        r"environment\.step raised KeyError: 'boom' \(counting\.py:\d+\)", answer.json()["detail"]
    )


async def test_concurrent_steps_of_one_environment_happen_one_after_the_other():
    async with running_app() as client:
        made = await created(client)
        answers = await asyncio.gather(*(stepped(client, made["env_id"], calls("a")) for _ in range(20)))
    assert sorted(answer.json()["info"]["turn"] for answer in answers) == list(range(1, 21))
    assert sum(answer.json()["reward"] for answer in answers) == 1.0


async def test_the_number_of_environments_is_bounded():
    async with running_app(max_sessions=2) as client:
        first = await created(client)
        await created(client)
        full = await client.post("/env/create", json={"env_name": "counting"})
        assert (full.status_code, full.json()["code"]) == (429, "capacity_reached")
        await client.post("/env/terminate", json={"env_id": first["env_id"]})
        await created(client)


@pytest.mark.parametrize("name", ["CrafterClassic", "crafter_classic"])
async def test_an_alias_names_an_environment_wherever_its_own_name_does(name):
    async with running_app(default_plug_boards()) as client:
        made = await created(client, env_name=name)
        shown = await client.get("/task_info", params={"env_name": name})
        snapshot = await client.post("/env/snapshot", json={"env_id": made["env_id"]})
        state = await client.get(f"/openenv/{name}/state", params={"session_id": made["env_id"]})
    assert made["observation"]["text"].startswith("=== CRAFTER GAME STATE ===")
    assert shown.json()["taskset"]["id"] == "crafter_procedural"
    assert snapshot.json()["info"]["env_name"] == "crafter", "a snapshot has the name on the board"
    assert state.status_code == 200


async def test_further_keys_of_other_task_apps_are_taken():
    async with running_app() as client:
        await created(client, rl_run_id="run-1", parent_env_id=None)


async def test_a_misspelling_of_one_of_our_keys_is_told_from_a_key_of_others():
    others = {"run_id": "r", "parent_env_id": None, "x" * 10_000: 1}
    async with running_app() as client:
        made = await created(client, **others)
        answer = await client.post("/env/reset", json={"env_id": made["env_id"], "sede": 1, "sead": 1})
        assert answer.status_code == 200, "too far from 'seed' to be sure"
        answer = await client.post("/env/step", json={"env_id": made["env_id"], "tool_call": calls("a")})
    assert (answer.status_code, answer.json()["where"]) == (422, "tool_call")
    assert answer.json()["detail"] == "tool_call: unknown key 'tool_call'. Did you mean 'tool_calls'?"


async def test_a_long_name_is_cut_in_the_message():
    async with running_app() as client:
        for body in ({"env_name": "x" * 200}, {"env_name": "counting", "config": {"y" * 5_000: 1}}):
            answer = await client.post("/env/create", json=body)
            assert (answer.status_code, len(answer.json()["detail"]) < 400) == (422, True)
