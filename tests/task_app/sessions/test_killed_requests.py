"""Requests with an Idempotency-Key that a kill cuts short: their retries do nothing twice.

They do all of it where it could be undone, and else are told that the answer is lost.
"""

import asyncio
from contextlib import contextmanager

import httpx
import pytest

from service_kit.problems import problem_response
from task_app.errors import SessionBusy
from task_app.plugins import default_plug_boards
from task_app.sessions.idempotency import Once, request_digest
from task_app.sessions.journal import NOT_CARRIED_OUT, WORK, Database, Work
from tests.task_app.counting import boards, rollout
from tests.task_app.rollout_client import WAITING, accept, waiting_boards
from tests.task_app.sessions.test_idempotency import keyed
from tests.task_app.sessions.test_recovery import app_on, killed, post

BOTH = boards()
BOTH.environments["crafter"] = default_plug_boards().environments["crafter"]
SNAPSHOTS = pytest.mark.parametrize("env_name", ["crafter", "counting"], ids=["snapshots", "played again"])


@contextmanager
def unanswered(client, path, json, key="k"):
    """What is done within is due to this request, which the kill will leave without an answer."""
    sent = client.build_request("POST", path, json=json)
    digest = request_digest("POST", path.encode(), b"", sent.content)
    token = WORK.set(Work(key=key, digest=digest))
    yield
    WORK.reset(token)


async def created(client, env_name, **headers):
    return (await post(client, "/env/create", {"env_name": env_name, "seed": 3}, **headers))["env_id"]


def many(env_id, count):
    return {"steps": [{"env_id": env_id, "tool_calls": []}] * count}


async def turns(client, env_id, count=1, **headers):
    results = (await post(client, "/env/step_many", many(env_id, count), **headers))["results"]
    return [item["info"]["turn"] for item in results]


def living(env_id, decisions, policy):
    """A whole /rollout on a living session."""
    ops = ["agent", "env"] * decisions
    return {"run_id": "r", "env": {"env_id": env_id}, "policy": policy, "ops": ops, "on_done": "terminate"}


async def lost(client, path, json, key="k"):
    refused = await post(client, path, json, status=409, **keyed(key))
    return refused["code"] == "answer_lost"


@SNAPSHOTS
async def test_a_batch_is_undone_whole_and_done_by_its_retry(tmp_path, env_name):
    async with app_on(tmp_path / "s", BOTH) as client:
        env_id = await created(client, env_name)
        with unanswered(client, "/env/step_many", many(env_id, 5)):
            await turns(client, env_id, 5)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [1, 2, 3, 4, 5]
        assert await turns(client, env_id, 5, **keyed("k")) == [1, 2, 3, 4, 5]
        assert await turns(client, env_id) == [6]


async def test_a_batch_is_undone_whole_also_where_a_snapshot_was_due_in_it(tmp_path):
    """A snapshot every 2 decisions: at the second and the fourth of five, the first of another request."""
    async with app_on(tmp_path / "0", BOTH, journal_snapshot_every=2) as client:
        env_id = await created(client, "crafter")
        assert await turns(client, env_id) == [1]
        with unanswered(client, "/env/step_many", many(env_id, 5)):
            await turns(client, env_id, 5)
        left = killed(tmp_path / "0", tmp_path)
    async with app_on(left, BOTH, journal_snapshot_every=2) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [2, 3, 4, 5, 6]
        again = killed(left, tmp_path / "more")
    async with app_on(again, BOTH, journal_snapshot_every=2) as client:
        assert await turns(client, env_id, 5, **keyed("k")) == [2, 3, 4, 5, 6]
        assert await turns(client, env_id) == [7]


@SNAPSHOTS
async def test_a_batch_under_way_stays_when_another_request_resets_its_session(tmp_path, env_name):
    async with app_on(tmp_path / "s", BOTH, journal_snapshot_every=2) as client:
        env_id = await created(client, env_name)
        with unanswered(client, "/env/step_many", many(env_id, 2)):
            await turns(client, env_id, 2)
        await post(client, "/env/reset", {"env_id": env_id})
        assert await turns(client, env_id, 3) == [1, 2, 3]
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH, journal_snapshot_every=2) as client:
        assert await lost(client, "/env/step_many", many(env_id, 2))
        assert await turns(client, env_id) == [4]


async def test_a_reset_stays_once_another_request_comes_to_its_session(tmp_path):
    async with app_on(tmp_path / "s", BOTH, journal_snapshot_every=1) as client:
        env_id = await created(client, "counting")
        await turns(client, env_id, 2)
        reset = {"env_id": env_id, "seed": 4}
        with unanswered(client, "/env/reset", reset):
            await post(client, "/env/reset", reset)
        # The next request has come, and has not done anything yet.
        session = client._transport.app.state.services.environments.find(env_id)
        session.journal.ready(session)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/reset", reset)
        assert await turns(client, env_id) == [1]


def played_actions(answer):
    (trajectory,) = answer["trajectories"]
    return [step["tool_calls"] for step in trajectory["steps"]]


async def test_a_rollout_on_living_sessions_is_undone_whole_and_played_the_same_by_its_retry(tmp_path):
    """Four decisions with a snapshot every 2; the policy's chance goes back too."""
    async with app_on(tmp_path / "s", journal_snapshot_every=2) as client:
        env_id = await created(client, "crafter")
        made = {"policy_name": "random", "config": {"seed": 5}, "bound_env_id": env_id}
        policy_id = (await post(client, "/policy/create", made))["policy_id"]
        played = living(env_id, 4, {"policy_id": policy_id})
        with unanswered(client, "/rollout", played):
            first = await post(client, "/rollout", played)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, journal_snapshot_every=2) as client:
        again = await post(client, "/rollout", played, **keyed("k"))
        assert (first["ops_executed"], again["ops_executed"]) == (8, 8)
        assert played_actions(again) == played_actions(first)
        asked = await post(client, "/policy/step", {"policy_id": policy_id})
        assert (asked["meta"]["turn"], await turns(client, env_id)) == (5, [5])


async def test_a_batch_on_two_sessions_is_undone_in_both_or_in_none(tmp_path):
    """In none, because a client continues one of the sessions."""
    async with app_on(tmp_path / "s", BOTH) as client:
        one, two = await created(client, "crafter"), await created(client, "counting")
        batch = {"steps": many(one, 1)["steps"] + many(two, 1)["steps"]}
        with unanswered(client, "/env/step_many", batch):
            await post(client, "/env/step_many", batch)
        first = killed(tmp_path / "s", tmp_path)
        await turns(client, two)
        second = killed(tmp_path / "s", tmp_path / "second")
    async with app_on(first, BOTH) as client:
        results = (await post(client, "/env/step_many", batch, **keyed("k")))["results"]
        assert [item["info"]["turn"] for item in results] == [1, 1]
    async with app_on(second, BOTH) as client:
        assert await lost(client, "/env/step_many", batch)
        assert (await turns(client, one), await turns(client, two)) == ([2], [3])


async def test_a_request_before_one_that_stays_stays_too(tmp_path):
    """k1 did one, k2 the other two; k2's first session went on, so k2 stays in both, and k1 before it."""
    async with app_on(tmp_path / "s", BOTH) as client:
        one, two = await created(client, "crafter"), await created(client, "counting")
        batch = {"steps": many(one, 1)["steps"] + many(two, 1)["steps"]}
        with unanswered(client, "/env/step_many", many(two, 1), "k1"):
            await turns(client, two)
        with unanswered(client, "/env/step_many", batch, "k2"):
            await post(client, "/env/step_many", batch)
        await turns(client, one)
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/step_many", many(two, 1), "k1")
        assert await lost(client, "/env/step_many", batch, "k2")
        assert (await turns(client, one), await turns(client, two)) == ([3], [3])


async def test_what_a_queued_rollout_does_is_due_to_its_own_request(tmp_path):
    """One place: a keyed /rollouts holds it, whose end starts a /rollout without a key on a session."""
    (first,), plugged = waiting_boards(1)
    async with app_on(tmp_path / "s", plugged, max_concurrent_rollouts=1) as client:
        env_id = await created(client, "counting")
        batch = {"rollouts": [rollout("r", **WAITING, limits={"max_decisions": 1})]}
        await post(client, "/rollouts", batch, status=202, **keyed("of another"))
        playing = asyncio.create_task(post(client, "/rollout", living(env_id, 2, {"policy_name": "planned"})))
        while client._transport.app.state.services.runner.unfinished()["queued"] < 1:
            await asyncio.sleep(0)
        first.go.set()
        await playing
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, plugged) as client:
        assert await turns(client, env_id) == [3]


async def test_an_answer_that_is_too_large_to_keep_leaves_what_was_done(tmp_path):
    async with app_on(tmp_path / "s", BOTH, max_idempotency_bytes=1_024) as client:
        env_id = await created(client, "crafter")
        assert await turns(client, env_id, 3, **keyed("k")) == [1, 2, 3]
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, BOTH) as client:
        assert await lost(client, "/env/step_many", many(env_id, 3))
        assert await turns(client, env_id) == [4]


async def test_a_batch_with_a_key_is_one_transaction_with_its_answer(tmp_path):
    statements = []
    async with app_on(tmp_path / "s", BOTH) as client:
        one, two = await created(client, "crafter"), await created(client, "counting")
        services = client._transport.app.state.services
        services.database.connection.set_trace_callback(statements.append)
        await post(
            client, "/env/step_many", {"steps": many(one, 9)["steps"] + many(two, 9)["steps"]}, **keyed("k")
        )
    assert [said for said in statements if said in ("BEGIN", "COMMIT")] == ["BEGIN", "COMMIT"]
    assert sum(said.startswith("INSERT INTO steps") for said in statements) == 18


async def test_rollouts_are_accepted_again_by_the_next_process(tmp_path):
    """They ended with the process before, so its answer would be about nothing."""
    policies, plugged = waiting_boards(2)
    batch = {"rollouts": [rollout("r", **WAITING)]}
    async with app_on(tmp_path / "s", plugged) as client:
        told = await post(client, "/rollouts", batch, status=202, **keyed("k"))
        assert await post(client, "/rollouts", batch, status=202, **keyed("k")) == told
        await post(client, "/run/abort", {"run_id": "over"}, **keyed("a"))
        left = killed(tmp_path / "s", tmp_path)
    async with app_on(left, plugged) as client:
        again = await client.post("/rollouts", json=batch, headers=keyed("k"))
        assert (again.status_code, "idempotency-replayed" in again.headers) == (202, False)
        assert again.json()["accepted"] == ["r"]
        assert again.json()["instance_id"] != told["instance_id"]
        assert (await accept(client, *batch["rollouts"])).json()["known"] == ["r"]
        aborted = await client.post("/run/abort", json={"run_id": "over"}, headers=keyed("a"))
        assert "idempotency-replayed" not in aborted.headers
        for policy in policies:
            policy.go.set()


@pytest.mark.parametrize(("does_something", "calls"), [(False, 2), (True, 1)])
async def test_a_refusal_after_something_was_done_does_not_free_the_key(does_something, calls):
    """A 503 says that nothing was done, and to ask again; the changes of sessions know better."""
    asked, database = [], Database(None, most=9, most_bytes=9_999, most_s=9.0)
    database.open()

    async def app(scope, receive, send):
        asked.append(scope["path"])
        if does_something:
            database.record(
                "env_1", [("DELETE FROM steps WHERE session = ?", ("env_1",))], NOT_CARRIED_OUT, whole=True
            )
        await problem_response(SessionBusy("it is busy"))(scope, receive, send)

    once = Once(app, database=database)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(once), base_url="http://t") as client:
        found = [(await client.post("/rollout", headers=keyed("k"))).status_code for _ in range(2)]
    database.close()
    assert (len(asked), found) == (calls, [503, 409 if does_something else 503])
