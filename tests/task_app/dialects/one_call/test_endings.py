"""POST /rollout that ends from outside: the task app stops, or its disk is full."""

import asyncio

import pytest

from task_app.errors import JournalFailed
from tests.task_app.counting import running_app
from tests.task_app.dialects.one_call.test_rollout import body
from tests.task_app.rollout_client import waiting_boards
from tests.task_app.test_policy_routes import create_env

KEYED = {"Idempotency-Key": "k"}
WAITING = {"policy_name": "waiting"}


def alive(env_id):
    return {"env_name": None, "env_id": env_id, "seed": None}


async def decided(policy, *, decisions):
    """Let it decide so often, and be asked once more."""
    for _ in range(decisions):
        await policy.asked.wait()
        policy.asked.clear()
        policy.go.set()
        policy.go.clear()
    await policy.asked.wait()


@pytest.mark.parametrize("decisions", [0, 1])
async def test_a_stop_of_the_task_app_is_no_abort_and_its_answer_is_not_kept(decisions):
    (policy, queued, _), plug_boards = waiting_boards(3)
    async with running_app(plug_boards, max_concurrent_rollouts=1) as client:
        services = client._transport.app.state.services
        asked = {"json": body(policy=WAITING), "headers": KEYED}
        playing = asyncio.create_task(client.post("/rollout", **asked))
        await decided(policy, decisions=decisions)
        waiting = asyncio.create_task(client.post("/rollout", json=body(policy=WAITING, run_id="queued")))
        while services.runner.unfinished()["queued"] == 0:
            await asyncio.sleep(0)
        await services.drain(within_s=0.0)
        answers = [await playing, await waiting, await client.post("/rollout", **asked)]
    for answer in answers:
        assert (answer.status_code, answer.json()["code"]) == (503, "shutting_down")
        assert "idempotency-replayed" not in answer.headers
    assert not queued.asked.is_set()


async def test_what_a_stopping_task_app_did_to_a_living_environment_is_told():
    (policy,), plug_boards = waiting_boards(1)
    async with running_app(plug_boards) as client:
        env_id = await create_env(client)
        asked = body(policy=WAITING, env=alive(env_id))
        playing = asyncio.create_task(client.post("/rollout", json=asked))
        await decided(policy, decisions=1)
        await client._transport.app.state.services.drain(within_s=0.0)
        answer = (await playing).json()
    assert (answer["aborted"], answer["metrics"]["num_steps"]) == (True, 1)
    assert "the task app stopped after 1 decision" in answer["warnings"][0]


async def test_an_abort_while_the_task_app_stops_is_an_abort():
    (policy,), plug_boards = waiting_boards(1)
    async with running_app(plug_boards) as client:
        playing = asyncio.create_task(client.post("/rollout", json=body(policy=WAITING)))
        await policy.asked.wait()
        services = client._transport.app.state.services
        services.runner.begin_drain()
        await services.runner.abort("run")
        answer = await playing
    assert (answer.status_code, answer.json()["aborted"]) == (200, True)


class FullDisk:
    """A journal that takes so many decisions and no more."""

    def __init__(self, takes):
        self._left = takes

    def ready(self, session):
        if not self._left:
            raise JournalFailed("the disk is full", hint="free space")
        self._left -= 1

    def reset(self, session): ...

    def add_step(self, session, requests): ...


@pytest.mark.parametrize("takes", [0, 1])
async def test_a_journal_that_cannot_be_written_is_no_abort(takes):
    async with running_app() as client:
        env_id = await create_env(client)
        session = client._transport.app.state.services.environments.find(env_id)
        session.journal = FullDisk(takes)
        answer = await client.post("/rollout", json=body(env=alive(env_id)))
    told = answer.json()
    if not takes:
        assert (answer.status_code, told["code"]) == (507, "journal_failed")
        return
    (trajectory,) = told["trajectories"]
    assert (told["aborted"], len(trajectory["steps"]), session.turn) == (False, 1, 1)
    assert trajectory["final"]["rollout_status"] == "partial_journal_failed"
    assert trajectory["final"]["error"] == "the disk is full"
