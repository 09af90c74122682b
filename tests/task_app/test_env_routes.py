"""/env: environments that the caller steps itself, by each of their routes, one by one and many at once."""

import asyncio
import json
from dataclasses import replace

import pytest

from shared_schemas.problem import Problem
from task_app.dialects.one_call.request import legacy_calls
from task_app.environments.crafter.prompt import tool_spec
from task_app.plugins import EnvironmentPlugin, PlugBoards, default_plug_boards
from task_app.sessions.sessions import EnvironmentSession
from tests.task_app.counting import CountingConfig, CountingEnvironment, running_app
from tests.task_app.playing import ON, act, decision, new_env, new_policy, post, refused, refused_at

# The same in the words of source 1, as a job's [training] has them.
TRAINING = {"step_rewards_enabled": True, "step_rewards_mode": "decision_stepwise"}


def calls(*names):
    return [{"tool": "add", "args": {"names": list(names)}}]


async def created(client, **body):
    return await post(client, "/env/create", **({"env_name": "counting", "seed": 3} | body))


def item(env_id, *names):
    return {"env_id": env_id, "tool_calls": calls(*names)}


async def stepped(client, env_id, *names):
    return await post(client, "/env/step", **item(env_id, *names))


@pytest.mark.parametrize("last", ["b", "boom"])
async def test_nothing_is_left_of_an_environment_that_is_terminated(last, live):
    async with running_app() as client:
        env_id = (await created(client))["env_id"]
        for name in ("a", last):
            await client.post("/env/step", json=item(env_id, name))
        assert live.count(EnvironmentSession) == 1
        await post(client, "/env/terminate", env_id=env_id)
        await live.until_gone(CountingEnvironment)
        await live.until_gone(EnvironmentSession)


async def test_a_create_shows_the_start_and_a_step_carries_what_the_design_says(client):
    made = await created(client, config={"step_rewards": ON})
    assert (made["step_idx"], made["info"]["seed"]) == (0, 3)
    assert made["info"]["tools"][0]["function"]["name"] == "add"
    assert made["observation"] == {
        "text": "step 0", "data": {"step": 0}, "reward_last_step": 0.0,
        "achievements_status": {"a": False, "b": False}, "achievements_counts": {"a": 0, "b": 0},
    }  # fmt: skip
    await stepped(client, made["env_id"], "a")
    answer = await stepped(client, made["env_id"], "a", "b", "x")
    assert answer.pop("observation")["achievements_counts"] == {"a": 2, "b": 1}
    assert answer == {
        "reward": 1.0, "env_rewards": [0.0, 1.0, 0.0], "reward_parts": [], "step_idx": 4,
        "done": False, "terminated": False, "truncated": False,
        "info": {
            "turn": 2, "achievements_added": ["b"], "invalid_reason": None,
            "executed_actions": ["a", "b", "x"], "tool_result": "did 3",
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
async def test_the_published_switches_act_in_a_training_or_a_rollout_table(client, path, body):
    made = await post(client, path, env_name="counting", **body)
    answer = await stepped(client, made["env_id"], "a")
    assert answer["metadata"]["decision_rewards"]["unique"] == ["a"]


@pytest.mark.parametrize("path", ["/env/create", "/policy/create"])
async def test_a_rollout_table_must_agree_and_without_our_names_it_is_left_alone(client, path):
    body = {"env_name": "counting", "policy_name": "planned"}
    if path == "/env/create":
        body.pop("policy_name")
    differ = {"training": {"step_rewards_enabled": False}, "rollout": TRAINING}
    assert await refused_at(client, path, **body, **differ) == (422, "rollout")
    wrong = await refused_at(client, path, **body, rollout={"step_rewards_mode": "x"})
    assert wrong == (422, "rollout.step_rewards_mode")
    await post(client, path, **body, rollout={"episodes": 2})


async def test_a_step_after_the_end_is_a_conflict_and_a_reset_starts_again(client):
    env_id = (await created(client))["env_id"]
    ended = await stepped(client, env_id, "a", "end", "b")
    assert (ended["done"], ended["terminated"], ended["step_idx"]) == (True, True, 2)
    assert (await refused(client, "/env/step", **item(env_id, "a")))[:2] == (409, "episode_over")
    again = await post(client, "/env/reset", env_id=env_id)
    assert (again["step_idx"], again["info"]["seed"]) == (0, 3)
    assert (await post(client, "/env/reset", env_id=env_id, seed=9))["info"]["seed"] == 9
    assert (await stepped(client, env_id, "a"))["info"]["turn"] == 1


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"env_name": "countin"}, "env_name"),
        *(({"seed": seed}, "seed") for seed in (-1, 2**31 - 1, "soon", 1.5, 7.0, "7", False)),
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
async def test_what_is_wrong_with_a_create_is_named(client, changes, where):
    body = {"env_name": "counting"} | changes
    assert await refused_at(client, "/env/create", **body) == (422, where)


async def test_concurrent_steps_of_one_environment_happen_one_after_the_other(client):
    made = await created(client)
    answers = await asyncio.gather(*(stepped(client, made["env_id"], "a") for _ in range(20)))
    assert sorted(answer["info"]["turn"] for answer in answers) == list(range(1, 21))
    assert sum(answer["reward"] for answer in answers) == 1.0


@pytest.mark.parametrize("name", ["CrafterClassic", "crafter_classic"])
async def test_an_alias_names_an_environment_wherever_its_own_name_does(real, name):
    made = await created(real, env_name=name)
    shown = await real.get("/task_info", params={"env_name": name})
    snapshot = await post(real, "/env/snapshot", env_id=made["env_id"])
    state = await real.get(f"/openenv/{name}/state", params={"session_id": made["env_id"]})
    assert made["observation"]["text"].startswith("=== CRAFTER GAME STATE ===")
    assert shown.json()["taskset"]["id"] == "crafter_procedural"
    assert snapshot["info"]["env_name"] == "crafter", "a snapshot has the name on the board"
    assert state.status_code == 200


async def test_a_misspelling_of_one_of_our_keys_is_told_from_a_key_of_others(client):
    others = {"run_id": "r", "parent_env_id": None, "x" * 10_000: 1}
    made = await created(client, **others)
    await post(client, "/env/reset", env_id=made["env_id"], sede=1, sead=1)  # too far from 'seed' to be sure
    told = await refused(client, "/env/step", env_id=made["env_id"], tool_call=calls("a"))
    assert (told[0], told[2]) == (422, "tool_call")
    assert told[3].startswith("tool_call: unknown key 'tool_call'. Did you mean 'tool_calls'? |")


async def test_a_long_name_or_number_is_cut_in_the_message(client):
    counting = {"env_name": "counting"}
    bodies = {"env_name": "x" * 200}, {**counting, "config": {"y" * 5_000: 1}}, {**counting, "seed": 10**300}
    for body in bodies:
        told = await refused(client, "/env/create", **body)
        assert (told[0], len(told[3].split(" | ")[0]) < 400) == (422, True)


async def step_many(client, *steps):
    return (await post(client, "/env/step_many", steps=steps))["results"]


async def test_items_are_carried_out_in_order_and_answer_what_the_single_route_answers(client):
    alone, first, second = [(await created(client))["env_id"] for _ in range(3)]
    single = await stepped(client, alone, "a")
    results = await step_many(client, item(first, "a"), item(second, "b", "b"), item(first, "a"))
    assert results[0] == {"env_id": first, "status": 200, **single}
    assert [one["env_id"] for one in results] == [first, second, first]
    assert [one["info"]["turn"] for one in results] == [1, 1, 2]
    assert [one["reward"] for one in results] == [1.0, 1.0, 0.0], "the second 'a' pays nothing"


async def test_a_bad_item_takes_no_step_and_spoils_no_other():
    async with running_app(max_calls_per_step=2) as client:
        good, ended = (await created(client))["env_id"], (await created(client))["env_id"]
        results = await step_many(
            client,
            item(good, "a"),
            item("unknown", "a"),
            {"env_id": good, "tool_calls": [{"args": {}}]},
            {"env_id": good, "tool_calls": calls("a") * 3},
            item(ended, "end"),
            item(ended, "a"),
            item(good, "boom"),
            item(good, "b"),
        )
    assert [one["status"] for one in results] == [200, 404, 422, 422, 200, 409, 424, 200]
    problems = [Problem.model_validate(one["problem"]) for one in results if one["status"] != 200]
    assert [one.where for one in problems] == [
        "steps.1.env_id", "steps.2.tool_calls", "steps.3.tool_calls", "steps.5", "steps.6",
    ]  # fmt: skip
    assert "boom" in json.dumps(results[6])
    assert results[7]["info"]["turn"] == 2, "three refused items and a broken one took no turn"


class Unspeakable(CountingEnvironment):
    """What it shows after `nan` is no JSON."""

    def _observe(self, reward):
        seen = super()._observe(reward)
        return replace(seen, data={"x": float("nan")}) if "nan" in self._counts else seen

    def _count(self, name):
        self._counts |= {"nan": 1} if name == "nan" else {}
        return super()._count(name)


async def test_an_answer_that_cannot_be_written_takes_no_other_along():
    async with running_app(
        PlugBoards({"counting": EnvironmentPlugin(CountingConfig, Unspeakable)}, {})
    ) as client:
        good, bad = (await created(client))["env_id"], (await created(client))["env_id"]
        results = await step_many(client, item(good, "a"), item(bad, "nan"), item(good, "b"))
    assert [one["status"] for one in results] == [200, 424, 200]
    assert (results[1]["problem"]["code"], results[1]["problem"]["where"]) == ("critical_error", "steps.1")


@pytest.mark.parametrize(
    ("body", "where"),
    [
        ({"step": []}, "step"),
        ({"steps": [{"env_id": "e", "tool_call": []}]}, "tool_call"),
        ([], "body"),
        ({"steps": []}, "steps"),
        ({"steps": [item("e", "a")] * 3}, "steps"),
    ],
)
async def test_a_body_of_another_shape_or_length_is_told_where_it_differs(body, where):
    async with running_app(max_steps_per_request=2) as client:
        answer = await client.post("/env/step_many", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert where in answer.json()["where"]


async def test_a_long_batch_lets_others_in_between_its_slices(client):
    busy, quick = (await created(client))["env_id"], (await created(client))["env_id"]
    long = asyncio.create_task(step_many(client, *[item(busy, *"x" * 50)] * 100))
    answered_early = False
    while not long.done():
        await stepped(client, quick, "a")
        answered_early |= not long.done()
    assert answered_early
    assert len(await long) == 100


ENV, POLICY = ("step", "reset", "snapshot", "terminate"), ("step", "snapshot", "terminate")
PATHS = [*(("env", act) for act in ENV), *(("policy", act) for act in POLICY)]
MORE = {("env", "step"): {"tool_calls": act("noop")}, ("policy", "step"): {"observation": {"text": "x"}}}


async def made(client):
    return {
        "env": await new_env(client),
        "policy": await new_policy(client, env={"env_name": "crafter"}, config={"seed": 1}),
    }


@pytest.mark.parametrize(("kind", "what"), PATHS)
async def test_the_id_may_stand_in_the_path_and_again_in_the_body_but_not_another_one(real, kind, what):
    ids = await made(real)
    path, key, more = f"/{kind}/{ids[kind]}/{what}", f"{kind}_id", MORE.get((kind, what), {})
    told = await refused(real, path, **more, **{key: f"{kind}_other"})
    assert told[:3] == (422, "invalid_request", key)
    assert f"'{kind}_other'" in told[3], "found"
    assert ids[kind] in told[3], "allowed"
    await post(real, path, **more, **{key: ids[kind]})
    gone = await real.post(path, json=more)
    assert gone.status_code == (404 if what == "terminate" else 200)


async def test_the_answers_are_those_of_the_routes_without_an_id_in_the_path(real):
    one, other = await made(real), await made(real)
    for _ in range(2):
        by_path = await post(real, f"/env/{one['env']}/step", **MORE["env", "step"])
        assert by_path == await post(real, "/env/step", env_id=other["env"], **MORE["env", "step"])
    reset = await post(real, f"/env/{one['env']}/reset", seed=5)
    assert reset == await post(real, "/env/reset", env_id=other["env"], seed=5)
    assert "Did you mean 'seed'" in (await refused(real, f"/env/{one['env']}/reset", sed=7))[3]
    for _ in range(2):
        by_path = await post(real, f"/policy/{one['policy']}/step", **MORE["policy", "step"])
        by_path["meta"].pop("policy_s")
        expected = await decision(real, other["policy"], **MORE["policy", "step"])
        assert (by_path["tool_calls"], by_path["meta"]) == expected


@pytest.mark.parametrize("body", [b"", b"null", b"{}"])
async def test_a_body_that_says_nothing_may_be_absent_null_or_empty(real, body):
    ids = await made(real)
    env, policy = f"/env/{ids['env']}", f"/policy/{ids['policy']}"
    bare = (f"{env}/reset", f"{env}/snapshot", f"{policy}/snapshot", "/openenv/crafter/reset")
    for path in (*bare, f"{env}/terminate"):
        answer = await real.post(path, content=body, headers={"Content-Type": "application/json"})
        assert answer.status_code == 200, answer.text


NAME = "/env/CrafterClassic"


async def started(client, name=NAME, **body):
    return await post(client, f"{name}/initialize", seed=17, **body)


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
        answer = await post(client, f"{NAME}/step", env_id=env_id, action=action)
        assert answer["info"]["achievements_added"] == ["collect_wood"], "docs/http.md, by other words"
        assert answer["step_idx"] == 4
        assert answer["observation"]["inventory"]["wood"] == 1
        assert answer["observation"]["player_position"] == [35, 32]
        assert await post(client, f"{NAME}/terminate", env_id=env_id) == {"ok": True}
        gone = await refused_at(client, f"{NAME}/step", env_id=env_id, action=action)
    assert gone == (404, "env_id")


@pytest.mark.parametrize("body", [{"world_config": "hard"}, {"config": {"difficulty": "easy"}}])
async def test_a_difficulty_is_ignored_aloud(real, body):
    made, plain = await started(real, **body), await started(real)
    assert "difficulty is ignored" in made["warnings"][0]
    assert plain["warnings"] == []
    assert made["observation"] == plain["observation"]


async def test_a_session_answers_to_its_own_name_and_to_both_kinds_of_routes(client):
    made = await started(client, "/env/counting")
    env_id = made["env_id"]
    call = {"tool": "add", "args": {"names": ["a"]}}
    body = {"env_id": env_id, "action": {"tool_calls": [call]}}
    named = await post(client, "/env/counting/step", **body)
    plain = await post(client, "/env/step", env_id=env_id, tool_calls=[call])
    assert [answer["info"]["turn"] for answer in (named, plain)] == [1, 2]
    for name in ("other", "CrafterClassic"):
        assert await refused_at(client, f"/env/{name}/step", **body) == (422, "env_name")


async def test_a_session_of_another_environment_is_not_found_under_this_name():
    crafter = default_plug_boards().environments["crafter"]
    boards = default_plug_boards()
    boards = type(boards)({"crafter": crafter, "twin": crafter}, boards.policies)
    async with running_app(boards) as client:
        made = await started(client, "/env/twin")
        told = await refused(client, f"{NAME}/terminate", env_id=made["env_id"])
    assert (told[0], told[3].split(" | ")[1]) == (404, "it is 'twin'")


@pytest.mark.parametrize(
    "action", [{}, {"tool_calls": "do"}, {"tool_calls": ["do"]}, {"tool_calls": [{"args": {}}]}]
)
async def test_an_action_of_no_known_form_is_refused_and_takes_no_step(real, action):
    env_id = (await started(real))["env_id"]
    told = await refused(real, f"{NAME}/step", env_id=env_id, action=action)
    assert (told[0], told[2].split(".")[0]) == (422, "action")
    after = await post(real, f"{NAME}/step", env_id=env_id, action={"actions": ["noop"]})
    assert after["info"]["turn"] == 1


@pytest.mark.parametrize(
    ("action", "names"),
    [
        ({"actions": ["do", 0, 1, 5, 16]}, ["do", "noop", "move_left", "do", "make_iron_sword"]),
        ({"actions": 5}, ["do"]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": 5}}]}, ["do"]),
        ({"tool_calls": [{"name": "interact", "arguments": {"actions": ["do"]}}]}, ["do"]),
        ({"tool_calls": [{"function": {"name": "sleep", "arguments": "{}"}}]}, ["sleep"]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": 17}}]}, [17]),
        ({"tool_calls": [{"tool": "interact", "args": {"action": True}}]}, [True]),
    ],
)
def test_older_spellings_become_calls_of_the_tool_on_offer(action, names):
    assert legacy_calls(action, [tool_spec(8)]) == [{"tool": "interact_many", "args": {"actions": names}}]


def test_what_is_no_older_spelling_passes_as_it_is():
    calls = [{"tool": "interact_many", "args": {"actions": [5]}}, {"tool": "fly"}, {"tool": "interact"}]
    assert legacy_calls({"tool_calls": calls}, [tool_spec(8)]) == calls
