"""--state-dir cannot be written: what was done is done once, and answered when it survives the process.

No file may grow: every write of the database fails meanwhile.
"""

import resource
from contextlib import contextmanager

import pytest

from task_app.errors import JournalFailed
from task_app.sessions.journal import FILE
from tests.task_app.rollout_client import waiting_boards
from tests.task_app.sessions.test_idempotency import keyed
from tests.task_app.sessions.test_killed_requests import BOTH, SNAPSHOTS, created, living, many, turns
from tests.task_app.sessions.test_recovery import app_on, killed, post, sessions_in


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "s"


@contextmanager
def full(folder):
    largest = (folder / f"{FILE}-wal").stat().st_size
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


async def refused(client, path, body, **headers):
    answer = await post(client, path, body, status=507, **headers)
    assert answer["code"] == "journal_failed"
    return answer["detail"], answer["hint"]


@SNAPSHOTS
async def test_a_step_with_a_key_is_taken_once_and_answered_when_it_is_written(tmp_path, folder, env_name):
    async with app_on(folder, BOTH) as client:
        env_id = await created(client, env_name)
        body = {"env_id": env_id, "tool_calls": []}
        with full(folder):
            for _ in range(3):
                detail, hint = await refused(client, "/env/step", body, **keyed("k"))
                assert detail.startswith("this request was carried out, but the journal cannot be written: ")
                assert hint.endswith("send it again with this Idempotency-Key: it is not carried out twice")
        answer = await post(client, "/env/step", body, **keyed("k"))
        assert answer["info"]["turn"] == 1
        left = killed(folder, tmp_path)
    async with app_on(left, BOTH) as client:
        assert await post(client, "/env/step", body, **keyed("k")) == answer
        assert await turns(client, env_id) == [2]


@SNAPSHOTS
async def test_a_step_without_a_key_says_that_it_was_taken_and_nothing_more_is_until_it_is_written(
    tmp_path, folder, env_name
):
    async with app_on(folder, BOTH) as client:
        env_id = await created(client, env_name)
        body = {"env_id": env_id, "tool_calls": []}
        with full(folder):
            detail, hint = await refused(client, "/env/step", body)
            assert detail.startswith("decision 1 was taken, but the journal cannot be written: ")
            assert hint.startswith("do not send it again")
            for headers in ({}, keyed("k")):
                detail, hint = await refused(client, "/env/step", body, **headers)
                assert detail.startswith("nothing was done: the journal cannot be written: ")
                assert hint.endswith("then send it again")
        assert (await post(client, "/env/step", body, **keyed("k")))["info"]["turn"] == 2
        left = killed(folder, tmp_path)
    async with app_on(left, BOTH) as client:
        assert await turns(client, env_id) == [3]


async def test_a_reset_that_could_not_be_written_is_written_by_the_next_request(tmp_path, folder):
    async with app_on(folder, BOTH) as client:
        env_id = await created(client, "counting")
        await turns(client, env_id, 3)
        with full(folder):
            detail, _ = await refused(client, "/env/reset", {"env_id": env_id, "seed": 9})
            assert detail.startswith("the reset was done, but")
        assert await turns(client, env_id) == [1]
        left = killed(folder, tmp_path)
    async with app_on(left, BOTH) as client:
        assert client._transport.app.state.services.environments.find(env_id).seed == 9
        assert await turns(client, env_id) == [2]


async def test_a_batch_with_a_key_is_answered_as_it_was_once_it_is_written(folder):
    async with app_on(folder, BOTH) as client:
        first, second = await created(client, "crafter"), await created(client, "counting")
        body = {"steps": many(first, 2)["steps"] + many(second, 1)["steps"]}
        with full(folder):
            await refused(client, "/env/step_many", body, **keyed("k"))
        results = (await post(client, "/env/step_many", body, **keyed("k")))["results"]
        assert [one["status"] for one in results] == [200, 200, 200]
        assert (await turns(client, first), await turns(client, second)) == ([3], [2])


async def test_entries_of_a_batch_without_a_key_answer_for_themselves(folder):
    async with app_on(folder, BOTH) as client:
        first, second = await created(client, "crafter"), await created(client, "counting")
        with full(folder):
            body = {"steps": many(first, 2)["steps"] + many(second, 1)["steps"]}
            results = (await post(client, "/env/step_many", body))["results"]
        assert [one["status"] for one in results] == [507, 507, 507]
        told = [one["problem"]["detail"].partition(": ")[0] for one in results]
        cannot = "but the journal cannot be written"
        assert told == [
            f"decision 1 was taken, {cannot}",
            "nothing was done",
            f"decision 1 was taken, {cannot}",
        ]
        assert (await turns(client, first), await turns(client, second)) == ([2], [2])


BODIES = {"/env/create": {"env_name": "crafter"}, "/policy/create": {"policy_name": "random"}}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("headers", [{}, keyed("k")], ids=["no key", "a key"])
async def test_a_session_that_could_not_be_written_is_made_once(folder, path, headers):
    async with app_on(folder, max_sessions=1) as client:
        with full(folder):
            for _ in range(2):
                detail, _ = await refused(client, path, BODIES[path], **headers)
                told = "this request was carried out, but" if headers else "nothing was done"
                assert detail.startswith(told)
        made = await post(client, path, BODIES[path], **headers)
        if headers:
            assert await post(client, path, BODIES[path], **headers) == made
    assert sessions_in(folder) == [made.get("env_id") or made["policy_id"]]


async def test_a_session_that_ends_on_a_full_disk_is_forgotten_by_the_next_write(folder):
    async with app_on(folder) as client:
        ended, other = await created(client, "crafter"), await created(client, "crafter")
        with full(folder):
            await post(client, "/env/terminate", {"env_id": ended})
        assert await turns(client, other) == [1]
    assert sessions_in(folder) == [other]


async def test_a_branch_that_could_not_be_written_whole_was_not_made(folder):
    async with app_on(folder) as client:
        env_id = await created(client, "crafter")
        environments = client._transport.app.state.services.environments
        opened, told = environments._on_new, []

        def once_full(session_id, session):
            told.append(session_id)
            if len(told) == 2:
                raise JournalFailed("the disk is full", hint="free space")
            opened(session_id, session)

        environments._on_new = once_full
        body = {"env_ids": [env_id], "num_children": 3}
        await refused(client, "/branch", body)
        assert len(environments) == 1
        children = (await post(client, "/branch", body, **keyed("k")))["env_branches"][env_id]
    assert sessions_in(folder) == sorted([env_id, *children])


async def test_a_policy_that_could_not_be_written_decides_no_more_until_it_is(tmp_path, folder):
    async with app_on(folder) as client:
        env_id = await created(client, "crafter")
        made = {"policy_name": "random", "config": {"seed": 5}, "bound_env_id": env_id}
        asked = {"policy_id": (await post(client, "/policy/create", made))["policy_id"]}
        with full(folder):
            detail, _ = await refused(client, "/policy/step", asked)
            assert detail.startswith("decision 1 was made, but")
            detail, _ = await refused(client, "/policy/step", asked)
            assert detail.startswith("nothing was done")
        assert (await post(client, "/policy/step", asked))["meta"]["turn"] == 2
        left = killed(folder, tmp_path)
        expected = (await post(client, "/policy/step", asked))["tool_calls"]
    async with app_on(left) as client:
        assert (await post(client, "/policy/step", asked))["tool_calls"] == expected


async def test_a_rollout_that_ends_on_a_full_disk_is_not_played_again_by_its_key(folder):
    (policy,), plugged = waiting_boards(1)
    policy.go.set()
    async with app_on(folder, plugged) as client:
        env_id = await created(client, "counting")
        body = living(env_id, 3, {"policy_name": "waiting"})
        with full(folder):
            await refused(client, "/rollout", body, **keyed("k"))
        again = await client.post("/rollout", json=body, headers=keyed("k"))
        assert again.headers["idempotency-replayed"] == "true"
        assert again.json()["ops_executed"] == 6
        assert await turns(client, env_id) == [4], "its three decisions were taken, once"
