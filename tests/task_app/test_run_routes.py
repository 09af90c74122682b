"""/run/abort and /run/status, for POST /rollouts and POST /rollout alike."""

import asyncio

from task_app.rollouts.runs import Runs
from tests.task_app.counting import rollout
from tests.task_app.playing import post
from tests.task_app.rollout_client import WAITING, accept, play, wait_for_all, waiting_app


async def abort(client, run_id="r"):
    return await post(client, "/run/abort", run_id=run_id)


async def status(client, run_id="r"):
    return (await client.get(f"/run/status/{run_id}")).json()


def legacy(run_id="r", **policy):
    return {
        "run_id": run_id,
        "env": {"env_name": "counting", "seed": 1},
        "policy": {"policy_name": "planned", **policy},
        "ops": ["agent", "env"] * 2,
    }


async def test_a_run_is_running_until_all_of_it_has_ended():
    async with waiting_app(1) as (client, (policy,)):
        await accept(client, rollout("a"), rollout("b", limits={"max_decisions": 1}, **WAITING))
        await policy.asked.wait()
        await wait_for_all(client, 1)
        running = await status(client)
        policy.go.set()
        await wait_for_all(client, 2)
        ended = await status(client)
    assert (running["status"], running["finished_at"]) == ("running", None)
    assert (ended["status"], ended["started_at"] <= ended["finished_at"]) == ("completed", True)
    assert ended["rollouts"] == {"unfinished": 0, "finished": 2, "failed": 0, "cancelled": 0}


async def test_an_abort_ends_what_runs_and_what_waits_and_nothing_of_another_run():
    async with waiting_app(3, max_concurrent_rollouts=2) as (client, policies):
        await accept(client, rollout("a", **WAITING), rollout("o", run_id="other", **WAITING))
        await accept(client, rollout("b", **WAITING))
        await policies[0].asked.wait()
        answer = await abort(client)
        assert (answer["ok"], answer["stopped"], answer["status"]) == (True, 2, "aborted")
        found = await wait_for_all(client, 2)
        assert {one.status for one in found.values()} == {"cancelled"}
        assert (await status(client, "other"))["status"] == "running"
        await abort(client, "other")


async def test_an_abort_before_the_start_is_kept(client):
    assert (await client.get("/run/status/r")).status_code == 404
    early = await abort(client)
    assert (early["stopped"], early["status"], early["started_at"]) == (0, "aborted", None)
    assert await abort(client) == early
    refused = await accept(client, rollout("a"))
    assert (refused.status_code, refused.json()["code"]) == (409, "run_aborted")
    assert refused.json()["where"] == "rollouts.0.run_id"
    answer = await post(client, "/rollout", **legacy())
    assert (answer["aborted"], answer["trajectories"], answer["ops_executed"]) == (True, [], 0)
    assert "'r' was aborted" in answer["warnings"][0]


async def test_a_run_that_was_complete_stays_so_but_starts_nothing_more(client):
    assert (await post(client, "/rollout", **legacy()))["aborted"] is False
    answer = await abort(client)
    assert (answer["stopped"], answer["status"]) == (0, "completed")
    assert (await post(client, "/rollout", **legacy()))["aborted"] is True


async def test_an_aborted_legacy_rollout_answers_with_the_steps_so_far():
    async with waiting_app(1) as (client, (policy,)):
        playing = asyncio.create_task(post(client, "/rollout", **legacy() | WAITING))
        await policy.asked.wait()
        policy.asked.clear()
        policy.go.set()
        policy.go.clear()
        await policy.asked.wait()
        assert (await abort(client))["stopped"] == 1
        answer = await playing
        assert (await status(client))["status"] == "aborted"
    assert (answer["aborted"], answer["metrics"]["num_steps"], answer["ops_executed"]) == (True, 1, 2)
    assert answer["trajectories"][0]["final"]["rollout_status"] == "partial_aborted"


async def test_a_run_of_which_nothing_finished_has_failed(client):
    url = {"inference_url": "http://127.0.0.1:1", "model": "m", "max_attempts": 1}
    await play(client, rollout("a", policy={"policy_name": "openai", "config": url}))
    assert (await status(client))["status"] == "failed"


def test_only_so_many_runs_are_remembered_and_never_one_that_runs_is_forgotten():
    now_s = 0.0
    runs = Runs(at_most=2, idle_s=10.0, clock=lambda: now_s)
    runs.add_rollout("lives")
    for name in ("x", "y", "z"):
        runs.abort(name)
    assert len(runs) == 2
    assert runs.get("lives").status == "running"
    assert runs.get("z").status == "aborted"
    now_s = 11.0
    assert runs.expire() == 1
    assert len(runs) == 1
