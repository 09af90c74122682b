"""POST /env/step_many: many decisions in one request, each answering for itself."""

import asyncio
import json
from dataclasses import replace

import pytest

from shared_schemas.problem import Problem
from task_app.plugins import EnvironmentPlugin, PlugBoards
from tests.task_app.counting import CountingConfig, CountingEnvironment, running_app
from tests.task_app.test_env_routes import calls, created, stepped


async def step_many(client, *steps):
    answer = await client.post("/env/step_many", json={"steps": list(steps)})
    assert answer.status_code == 200, answer.text
    return answer.json()["results"]


def item(env_id, *names):
    return {"env_id": env_id, "tool_calls": calls(*names)}


async def test_an_item_answers_what_the_single_route_answers():
    async with running_app() as client:
        one, other = (await created(client))["env_id"], (await created(client))["env_id"]
        single = (await stepped(client, one, calls("a", "b"))).json()
        (many,) = await step_many(client, item(other, "a", "b"))
    assert many == {"env_id": other, "status": 200, **single}


async def test_decisions_are_carried_out_in_order_over_many_environments():
    async with running_app() as client:
        first, second = (await created(client))["env_id"], (await created(client))["env_id"]
        results = await step_many(client, item(first, "a"), item(second, "b", "b"), item(first, "a"))
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


async def test_the_number_of_items_is_bounded_and_none_is_refused_as_a_whole():
    async with running_app(max_steps_per_request=2) as client:
        env_id = (await created(client))["env_id"]
        for steps, where in (([item(env_id, "a")] * 3, "steps"), ([], "steps")):
            answer = await client.post("/env/step_many", json={"steps": steps})
            assert (answer.status_code, answer.json()["where"]) == (422, where)
        (result,) = await step_many(client, item(env_id, "a"))
    assert result["info"]["turn"] == 1


@pytest.mark.parametrize(
    ("body", "where"),
    [({"step": []}, "step"), ({"steps": [{"env_id": "e", "tool_call": []}]}, "tool_call"), ([], "body")],
)
async def test_a_body_of_another_shape_is_told_where_it_differs(body, where):
    async with running_app() as client:
        answer = await client.post("/env/step_many", json=body)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert where in answer.json()["where"]


async def test_a_long_batch_lets_others_in_between_its_slices():
    async with running_app() as client:
        busy, quick = (await created(client))["env_id"], (await created(client))["env_id"]
        long = asyncio.create_task(step_many(client, *[item(busy, *"x" * 50)] * 100))
        answered_early = False
        while not long.done():
            await stepped(client, quick, calls("a"))
            answered_early |= not long.done()
        assert answered_early
        assert len(await long) == 100
