"""POST, GET, DELETE /rollouts and the ack: same id = same rollout, delivered until acknowledged."""

import asyncio

import pytest

from shared_schemas.rollouts import Rollout
from tests.task_app.counting import rollout, running_app
from tests.task_app.rollout_client import WAITING, accept, page, wait_for_all, waiting_boards


async def test_accepted_rollouts_are_run_and_delivered():
    async with running_app() as client:
        answer = await accept(client, rollout("a/1"), rollout("a/2"))
        assert answer.status_code == 202
        assert (answer.json()["accepted"], answer.json()["known"]) == (["a/1", "a/2"], [])
        found = await wait_for_all(client, 2)
    assert {one.status for one in found.values()} == {"finished"}
    assert found["a/1"].trajectory is not None
    assert found["a/1"].trajectory.stop_reason == "max_decisions"


async def test_the_same_request_again_is_known_before_and_after_the_end():
    async with running_app() as client:
        await accept(client, rollout("a"))
        assert (await accept(client, rollout("a"), rollout("b"))).json()["known"] == ["a"]
        await wait_for_all(client, 2)
        again = (await accept(client, rollout("a"))).json()
        assert (again["accepted"], again["known"]) == ([], ["a"])
        assert len((await page(client)).rollouts) == 2


async def test_twice_in_one_request_is_one_rollout():
    async with running_app() as client:
        answer = (await accept(client, rollout("a"), rollout("a"))).json()
    assert (answer["accepted"], answer["known"]) == (["a"], ["a"])


@pytest.mark.parametrize("in_one_request", [True, False])
async def test_the_same_id_with_another_body_is_a_conflict(in_one_request):
    first, other = rollout("a"), rollout("a", start={"seed": 2})
    async with running_app() as client:
        if not in_one_request:
            await accept(client, first)
        answer = await accept(client, rollout("new"), *([first] if in_one_request else []), other)
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
        assert answer.json()["where"] == f"rollouts.{1 + in_one_request}.rollout_id"
        assert (await client.get("/rollouts/new")).status_code == 404, "all or nothing"


async def test_a_retry_may_carry_a_fresh_key():
    def with_key(key):
        config = {"inference_url": "http://127.0.0.1:1", "model": "m", "max_attempts": 1}
        return rollout("a", policy={"policy_name": "openai", "config": config, "inference_key": key})

    async with running_app() as client:
        await accept(client, with_key("one"))
        assert (await accept(client, with_key("two"))).json()["known"] == ["a"]


async def test_a_cursor_delivers_each_rollout_once_and_none_everything_again():
    async with running_app() as client:
        await accept(client, rollout("a"))
        first = await page(client)
        await accept(client, rollout("b"))
        second = await page(client, first.cursor)
        assert [one.rollout_id for one in first.rollouts] == ["a"]
        assert [one.rollout_id for one in second.rollouts] == ["b"]
        assert [one.rollout_id for one in (await page(client)).rollouts] == ["a", "b"]
        rest = await page(client, second.cursor)
        assert (rest.rollouts, rest.unfinished, rest.cursor) == ((), 0, second.cursor)


async def test_a_page_is_bounded_and_the_next_one_goes_on():
    async with running_app(max_page_rollouts=2) as client:
        await accept(client, *(rollout(f"{i}") for i in range(5)))
        await wait_for_all(client, 5)
        sizes, cursor = [], None
        for _ in range(4):
            one = await page(client, cursor)
            sizes.append(len(one.rollouts))
            cursor = one.cursor
    assert sizes == [2, 2, 1, 0]


@pytest.mark.parametrize("cursor", ["0123456789abcdef.3", "nonsense", "x.y.z", "."])
async def test_a_cursor_of_another_instance_has_expired(cursor):
    async with running_app() as client:
        answer = await client.get("/rollouts", params={"run_id": "r", "cursor": cursor})
    assert (answer.status_code, answer.json()["code"]) == (409, "cursor_expired")


async def test_a_run_sees_only_its_own_rollouts():
    async with running_app() as client:
        await accept(client, rollout("a"), rollout("b", run_id="other"))
        assert list(await wait_for_all(client, 1)) == ["a"]
        assert list(await wait_for_all(client, 1, run_id="other")) == ["b"]


async def test_an_unknown_run_answers_at_once_with_nothing():
    async with running_app() as client, asyncio.timeout(5.0):
        nothing = await page(client, run_id="unknown", wait_s=30.0)
    assert (nothing.rollouts, nothing.unfinished) == ((), 0)


async def test_a_long_poll_wakes_when_a_rollout_ends():
    (policy,), plug_boards = waiting_boards(1)
    async with running_app(plug_boards) as client, asyncio.timeout(10.0):
        await accept(client, rollout("a", limits={"max_decisions": 1}, **WAITING))
        nothing = await page(client, wait_s=0.05)
        assert (nothing.rollouts, nothing.unfinished) == ((), 1), "a poll ends with its time"
        polls = [asyncio.create_task(page(client, wait_s=30.0)) for _ in range(3)]
        await policy.asked.wait()
        assert not any(poll.done() for poll in polls)
        policy.go.set()
        for poll in polls:
            assert [one.rollout_id for one in (await poll).rollouts] == ["a"]


async def test_a_longer_wait_than_allowed_is_refused():
    async with running_app(max_wait_s=5.0) as client:
        answer = await client.get("/rollouts", params={"run_id": "r", "wait_s": 6})
    assert (answer.status_code, answer.json()["where"]) == (422, "wait_s")
    assert "at most 5" in answer.json()["detail"]


async def test_acknowledged_rollouts_are_forgotten_and_others_are_named():
    _, plug_boards = waiting_boards(1)
    async with running_app(plug_boards) as client:
        await accept(client, rollout("a"), rollout("b", run_id="other"))
        await wait_for_all(client, 1)
        await wait_for_all(client, 1, run_id="other")
        await accept(client, rollout("c", **WAITING))
        answer = await client.post(
            "/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a", "b", "c", "unknown"]}
        )
        assert answer.json() == {"acked": ["a"], "unknown": ["b", "c", "unknown"]}
        gone = await client.get("/rollouts/a")
        assert (gone.status_code, gone.json()["code"]) == (404, "unknown_id")
        assert (await client.get("/rollouts/c")).json()["status"] == "running"


async def test_no_more_is_accepted_than_can_be_held_until_some_are_acknowledged():
    async with running_app(max_rollouts_held=2) as client:
        await accept(client, rollout("a"), rollout("b"))
        await wait_for_all(client, 2)
        full = await accept(client, rollout("c"))
        assert (full.status_code, full.json()["code"]) == (429, "capacity_reached")
        assert full.headers["retry-after"] == "1"
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a"]})
        assert (await accept(client, rollout("c"))).status_code == 202


async def test_at_most_so_many_run_at_once_in_order_of_acceptance():
    policies, plug_boards = waiting_boards(3)
    async with running_app(plug_boards, max_concurrent_rollouts=2) as client:
        await accept(client, *(rollout(name, limits={"max_decisions": 1}, **WAITING) for name in "abc"))
        await policies[0].asked.wait()
        await policies[1].asked.wait()
        states = [(await client.get(f"/rollouts/{name}")).json()["status"] for name in "abc"]
        assert states == ["running", "running", "queued"]
        policies[1].go.set()
        await policies[2].asked.wait()
        policies[0].go.set()
        policies[2].go.set()
        assert len(await wait_for_all(client, 3)) == 3


async def test_cancelling_before_the_start_while_running_twice_and_after_the_end():
    policies, plug_boards = waiting_boards(2)
    async with running_app(plug_boards, max_concurrent_rollouts=1) as client:
        await accept(client, rollout("runs", **WAITING), rollout("waits", **WAITING), rollout("ends"))
        await policies[0].asked.wait()
        for name, words in (("waits", "before it started"), ("runs", "while it ran")):
            for _ in range(2):
                state = (await client.delete(f"/rollouts/{name}")).json()
                assert (state["status"], state["failure"]["code"]) == ("cancelled", "cancelled")
                assert words in state["failure"]["detail"]
        found = await wait_for_all(client, 3)
        assert not policies[1].asked.is_set()
        assert found["ends"].status == "finished", "the place of a cancelled one is free"
        after = Rollout.model_validate_json((await client.delete("/rollouts/ends")).content)
        assert (after.status, after.trajectory is None) == ("finished", False)
        assert (await client.delete("/rollouts/unknown")).status_code == 404


async def test_cancelling_in_the_moment_of_acceptance_ends_it_once():
    async with running_app() as client:
        answers = await asyncio.gather(
            accept(client, rollout("a")), *(client.delete("/rollouts/a") for _ in range(3))
        )
        assert {answer.status_code for answer in answers[1:]} <= {200, 404}
        one = await page(client)
        assert ([ended.rollout_id for ended in one.rollouts], one.unfinished) == (["a"], 0)


async def test_the_end_of_the_service_ends_everything_and_answers_who_waits():
    policies, plug_boards = waiting_boards(2)
    async with running_app(plug_boards, max_concurrent_rollouts=1) as client, asyncio.timeout(10.0):
        await accept(client, rollout("a", **WAITING), rollout("b", **WAITING))
        await policies[0].asked.wait()
        poll = asyncio.create_task(page(client, wait_s=30.0))
        runner = client._transport.app.state.services.runner  # the test stands in for a signal
        await runner.drain()
        assert (await poll).unfinished <= 2
        refused = await accept(client, rollout("c"))
        assert (refused.status_code, refused.json()["code"]) == (503, "shutting_down")
        states = [(await client.get(f"/rollouts/{name}")).json()["status"] for name in "ab"]
    assert states == ["cancelled", "cancelled"]


async def test_results_that_are_never_fetched_expire():
    async with running_app(finished_expiry_s=1e-9) as client:
        await accept(client, rollout("a"))
        await wait_for_all(client, 1)
        client._transport.app.state.services.expire()
        assert (await client.get("/rollouts/a")).status_code == 404
