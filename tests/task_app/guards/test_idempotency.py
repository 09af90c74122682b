"""Idempotency-Key: what is sent twice is done once."""

import asyncio

import pytest

from task_app.errors import CapacityReached, IdempotencyConflict
from task_app.guards.idempotency import Answer, Answers, request_digest
from tests.task_app.counting import running_app
from tests.task_app.slow import Gates, slow_boards

CALLS = [{"tool": "add", "args": {"names": ["a"]}}]


def keyed(key):
    return {"Idempotency-Key": key}


async def made(client, env_name="counting", **headers):
    answer = await client.post("/env/create", json={"env_name": env_name}, headers=headers)
    assert answer.status_code == 200, answer.text
    return answer.json()["env_id"]


async def stepped(client, env_id, key, calls=CALLS):
    body = {"env_id": env_id, "tool_calls": calls}
    return await client.post("/env/step", json=body, headers=keyed(key))


async def test_a_retried_step_is_answered_again_and_not_taken_again():
    async with running_app() as client:
        env_id = await made(client)
        first, again = await stepped(client, env_id, "k1"), await stepped(client, env_id, "k1")
        assert again.content == first.content
        assert (first.headers.get("idempotency-replayed"), again.headers["idempotency-replayed"]) == (
            None,
            "true",
        )
        assert (await stepped(client, env_id, "k2")).json()["info"]["turn"] == 2


async def test_the_same_key_with_another_request_is_a_conflict():
    async with running_app() as client:
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
        refused = await client.post("/env/create", json={"env_name": "counting"}, headers=keyed("d"))
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")


async def test_what_was_not_carried_out_is_not_remembered():
    async with running_app(max_sessions=1) as client:
        env_id = await made(client)
        body = {"env_name": "counting"}
        assert (await client.post("/env/create", json=body, headers=keyed("c"))).status_code == 429
        await client.post("/env/terminate", json={"env_id": env_id})
        assert (await client.post("/env/create", json=body, headers=keyed("c"))).status_code == 200


async def test_a_step_that_broke_the_environment_is_not_taken_again():
    boom = [{"tool": "add", "args": {"names": ["boom"]}}]
    async with running_app() as client:
        env_id = await made(client)
        first, again = await stepped(client, env_id, "k", boom), await stepped(client, env_id, "k", boom)
    assert (first.status_code, again.status_code) == (500, 500)
    assert again.headers["idempotency-replayed"] == "true"


@pytest.mark.parametrize("key", ["", " ", "k" * 201, "schlüssel".encode("latin-1"), b"a\tb"])
async def test_a_key_that_is_none_is_refused(key):
    async with running_app() as client:
        answer = await client.post(
            "/env/create", json={"env_name": "counting"}, headers={"Idempotency-Key": key}
        )
    assert (answer.status_code, answer.json()["where"]) == (422, "header Idempotency-Key")


async def test_two_keys_are_refused():
    async with running_app() as client:
        headers = [("Idempotency-Key", "a"), ("Idempotency-Key", "b")]
        answer = await client.post("/env/create", json={"env_name": "counting"}, headers=headers)
    assert (answer.status_code, answer.json()["where"]) == (422, "header Idempotency-Key")


async def test_a_body_that_is_too_large_is_refused_with_a_key_too():
    async with running_app(max_body_bytes=2_000) as client:

        async def parts():
            for _ in range(3):
                yield b"x" * 1_000

        answer = await client.post("/env/create", content=parts(), headers=keyed("k"))
    assert (answer.status_code, answer.json()["code"]) == (413, "body_too_large")


async def test_a_stranger_learns_nothing_from_a_key():
    async with running_app() as client:
        env_id = await made(client)
        await stepped(client, env_id, "k")
        client.headers["X-API-Key"] = "wrong"
        assert (await stepped(client, env_id, "k")).status_code == 401


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def answered(answers, key, size=1):
    answers.settle(answers.take(key, "digest"), Answer(200, (), b"x" * size))


def known(answers, *keys):
    return [key for key in keys if answers.find(key, "digest") is not None]


def test_keys_are_forgotten_by_number_bytes_and_age_oldest_first():
    clock = Clock()
    answers = Answers(most=3, most_bytes=10, most_s=60.0, clock=clock)
    for key in "abcd":
        answered(answers, key)
    assert known(answers, *"abcd") == ["b", "c", "d"]
    answered(answers, "large", size=9)
    assert known(answers, "c", "d", "large") == ["d", "large"], "9 + 1 bytes fit, 9 + 1 + 1 do not"
    clock.now_s = 61.0
    assert known(answers, "d", "large") == []
    assert (len(answers), answers.held_bytes) == (0, 0)


def test_what_is_being_carried_out_is_never_forgotten():
    clock = Clock()
    answers = Answers(most=2, most_bytes=10, most_s=1.0, clock=clock)
    first, _ = answers.take("first", "digest"), answers.take("second", "digest")
    clock.now_s = 100.0
    assert known(answers, "first", "second") == ["first", "second"]
    with pytest.raises(CapacityReached):
        answers.take("third", "digest")
    answers.release(first)
    answers.take("third", "digest")


def test_the_digest_keeps_the_parts_of_a_request_apart():
    assert request_digest("POST", b"/a", b"bc", b"") != request_digest("POST", b"/ab", b"c", b"")
    answers = Answers(most=2, most_bytes=10, most_s=1.0)
    answers.take("k", request_digest("POST", b"/a", b"", b"1"))
    with pytest.raises(IdempotencyConflict):
        answers.find("k", request_digest("POST", b"/a", b"", b"2"))
