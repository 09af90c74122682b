"""Idempotency-Key: what is sent twice is done once."""

import asyncio

import pytest

from task_app.sessions.idempotency import request_digest
from task_app.sessions.journal import Answer, Database, Work
from tests.task_app.counting import Clock, running_app
from tests.task_app.playing import post, refused
from tests.task_app.slow import Gates, slow_boards

CALLS = [{"tool": "add", "args": {"names": ["a"]}}]


def keyed(key):
    return {"Idempotency-Key": key}


async def made(client, env_name="counting", **headers):
    return (await post(client, "/env/create", headers, env_name=env_name))["env_id"]


async def stepped(client, env_id, key, calls=CALLS):
    body = {"env_id": env_id, "tool_calls": calls}
    return await client.post("/env/step", json=body, headers=keyed(key))


async def test_the_same_key_with_another_request_is_a_conflict(client):
    env_id = await made(client)
    await stepped(client, env_id, "k")
    for answer in (
        await stepped(client, env_id, "k", calls=[]),
        await client.post("/env/reset", json={"env_id": env_id}, headers=keyed("k")),
    ):
        assert (answer.status_code, answer.json()["code"]) == (409, "idempotency_conflict")
    assert (await stepped(client, env_id, "new")).json()["info"]["turn"] == 2


async def test_retries_that_come_while_the_first_is_carried_out_wait_for_its_answer():
    gates = Gates()
    async with running_app(slow_boards(gates)) as client, asyncio.timeout(20.0):
        env_id = await made(client, "slow")
        sent = [asyncio.create_task(stepped(client, env_id, "k")) for _ in range(10)]
        await asyncio.to_thread(gates.entered.wait, 10.0)
        gates.step.set()
        answers = await asyncio.gather(*sent)
    assert gates.calls == 1
    assert {answer.content for answer in answers} == {answers[0].content}
    assert sum("idempotency-replayed" in answer.headers for answer in answers) == 9


async def test_a_retried_create_or_restore_makes_one_session():
    async with running_app(max_sessions=1) as client:
        assert await made(client, **keyed("c")) == await made(client, **keyed("c"))
        more = await client.post("/env/create", json={"env_name": "counting"}, headers=keyed("d"))
        assert (more.status_code, more.headers["retry-after"]) == (429, "1")


async def test_what_was_not_carried_out_is_not_remembered():
    async with running_app(max_sessions=1) as client:
        env_id = await made(client)
        assert (await refused(client, "/env/create", keyed("c"), env_name="counting"))[0] == 429
        await post(client, "/env/terminate", env_id=env_id)
        await made(client, **keyed("c"))


async def test_a_step_that_broke_the_environment_is_not_taken_again(client):
    boom = [{"tool": "add", "args": {"names": ["boom"]}}]
    env_id = await made(client)
    first, again = await stepped(client, env_id, "k", boom), await stepped(client, env_id, "k", boom)
    assert (first.status_code, again.status_code) == (424, 424)
    assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize(
    "keys", [[""], [" "], ["k" * 201], ["schlüssel".encode("latin-1")], [b"a\tb"], ["a", "b"]]
)
async def test_a_key_that_is_none_is_refused_and_so_are_two(client, keys):
    headers = [("Idempotency-Key", key) for key in keys]
    answer = await client.post("/env/create", json={"env_name": "counting"}, headers=headers)
    assert (answer.status_code, answer.json()["where"]) == (422, "header Idempotency-Key")


async def test_a_body_that_is_too_large_is_refused_with_a_key_too():
    async with running_app(max_body_bytes=2_000) as client:

        async def parts():
            for _ in range(3):
                yield b"x" * 1_000

        answer = await client.post("/env/create", content=parts(), headers=keyed("k"))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_a_stranger_learns_nothing_from_a_key(client):
    env_id = await made(client)
    await stepped(client, env_id, "k")
    client.headers["X-API-Key"] = "wrong"
    assert (await stepped(client, env_id, "k")).status_code == 401


def opened(folder=None, clock=None, **bounds):
    bounds = {"most": 1_000, "most_bytes": 1 << 20, "most_s": 60.0} | bounds
    database = Database(folder, **bounds, clock=clock or Clock())
    database.open()
    return database


def answered(database, *keys, body=b"x", digest="digest", **more):
    for key in keys:
        database.write(Work(key=key, digest=digest, answer=Answer(200, (), body), **more))


def known(database, keys):
    return [key for key in keys if database.answer(key) is not None]


def test_keys_are_forgotten_by_number_bytes_and_age_oldest_first():
    clock = Clock()
    database = opened(clock=clock, most=3, most_bytes=10)
    answered(database, *"abcd")
    assert known(database, "abcd") == ["b", "c", "d"]
    answered(database, "l", body=b"x" * 9)
    assert known(database, "cdl") == ["d", "l"], "9 + 1 bytes fit, 9 + 1 + 1 do not"
    clock.now_s = 61.0
    assert known(database, "dl") == []
    answered(database, "n")
    assert database.totals == (1, 1)
    database.close()


def test_a_key_that_is_used_again_after_its_time_counts_once():
    clock = Clock()
    database = opened(clock=clock)
    answered(database, "k", body=b"first")
    clock.now_s = 61.0
    answered(database, "k", body=b"last", digest="another")
    assert database.answer("k") == ("another", Answer(200, (), b"last"))
    assert database.totals == (1, 4)
    database.close()


def test_what_is_being_carried_out_is_never_forgotten():
    database = opened(most=1, most_bytes=10)
    under_way = Work(key="under way", digest="digest")
    database.write(under_way)
    answered(database, *"abc")
    assert known(database, ["under way", *"abc"]) == ["under way", "c"]
    under_way.answer = Answer(200, (), b"xy")
    database.write(under_way)
    assert (known(database, ["under way", "c"]), database.totals) == (["under way"], (1, 2))
    database.close()


async def test_a_task_app_that_carries_out_as_many_keyed_requests_as_it_may_takes_no_more():
    gates = Gates()
    async with running_app(slow_boards(gates), max_idempotency_keys=1) as client, asyncio.timeout(20.0):
        env_id, other = await made(client, "slow"), await made(client, "slow")
        first = asyncio.create_task(stepped(client, env_id, "k"))
        await asyncio.to_thread(gates.entered.wait, 10.0)
        told = await stepped(client, other, "another")
        assert (told.status_code, told.json()["code"]) == (429, "capacity_reached")
        gates.step.set()
        assert (await first).status_code == 200
        assert (await stepped(client, other, "another")).status_code == 200


def test_the_next_process_has_the_answers_as_they_were_and_those_that_were_cut_short_as_lost(tmp_path):
    database = opened(tmp_path)
    headers = ((b"a", b"\xff: b"), (b"c", b""))
    database.write(Work(key="k", digest="d", answer=Answer(200, headers, b"\x00\xff")))
    answered(database, "of this process", survives=False)
    database.write(Work(key="cut short", digest="d"))
    database.close()
    again = opened(tmp_path)
    assert again.answer("k") == ("d", Answer(200, headers, b"\x00\xff"))
    assert again.answer("cut short") == ("d", None)
    assert again.answer("of this process") is None
    assert again.totals[0] == 2
    again.close()


def test_the_next_process_forgets_by_its_own_clock(tmp_path):
    database = opened(tmp_path, Clock())
    answered(database, "k")
    database.close()
    clock = Clock()
    clock.now_s = -1_000.0
    again = opened(tmp_path, clock)
    clock.now_s += 60.0
    assert known(again, "k") == ["k"]
    clock.now_s += 1.0
    assert known(again, "k") == []
    again.close()


def test_the_digest_keeps_the_parts_of_a_request_apart():
    assert request_digest("POST", b"/a", b"bc", b"") != request_digest("POST", b"/ab", b"c", b"")
    assert request_digest("POST", b"/a", b"", b"1") != request_digest("POST", b"/a", b"", b"2")
