"""/rollouts and /run: same id = same rollout, delivered until acknowledged; bounds, cancels and aborts."""

import asyncio

import pytest

from shared_schemas.rollouts import Rollout
from task_app.errors import PolicyUnavailable
from task_app.rollouts.results import Record
from tests.task_app.counting import (
    CountingEnvironment,
    PlannedPolicy,
    WaitingPolicy,
    add,
    boards,
    rollout,
    running_app,
)
from tests.task_app.fake_inference import calling, fake_inference, status
from tests.task_app.playing import post
from tests.task_app.rollout_client import (
    WAITING,
    accept,
    page,
    play,
    wait_for_all,
    waiting_app,
    waiting_boards,
)


async def test_the_same_request_again_is_known_before_and_after_the_end(client):
    twice = (await accept(client, rollout("a"), rollout("a"))).json()
    assert (twice["accepted"], twice["known"]) == (["a"], ["a"])
    assert (await accept(client, rollout("a"), rollout("b"))).json()["known"] == ["a"]
    await wait_for_all(client, 2)
    again = (await accept(client, rollout("a"))).json()
    assert (again["accepted"], again["known"]) == ([], ["a"])
    assert len((await page(client)).rollouts) == 2


@pytest.mark.parametrize("in_one_request", [True, False])
async def test_the_same_id_with_another_body_is_a_conflict(client, in_one_request):
    first, other = rollout("a"), rollout("a", start={"seed": 2})
    if not in_one_request:
        await accept(client, first)
    answer = await accept(client, rollout("new"), *([first] if in_one_request else []), other)
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")
    assert answer.json()["where"] == f"rollouts.{1 + in_one_request}.rollout_id"
    assert (await client.get("/rollouts/new")).status_code == 404, "all or nothing"


async def test_a_retry_may_carry_a_fresh_key(client):
    def with_key(key):
        config = {"inference_url": "http://127.0.0.1:1", "model": "m", "max_attempts": 1}
        return rollout("a", policy={"policy_name": "openai", "config": config, "inference_key": key})

    await accept(client, with_key("one"))
    assert (await accept(client, with_key("two"))).json()["known"] == ["a"]


async def test_a_cursor_delivers_each_rollout_once_and_none_everything_again(client):
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
        await play(client, *(rollout(f"{i}") for i in range(5)))
        sizes, cursor = [], None
        for _ in range(4):
            one = await page(client, cursor)
            sizes.append(len(one.rollouts))
            cursor = one.cursor
    assert sizes == [2, 2, 1, 0]


@pytest.mark.parametrize("cursor", ["0123456789abcdef.3", "nonsense", "x.y.z", "."])
async def test_a_cursor_of_another_instance_has_expired(client, cursor):
    answer = await client.get("/rollouts", params={"run_id": "r", "cursor": cursor})
    assert (answer.status_code, answer.json()["code"]) == (409, "cursor_expired")


async def test_a_run_sees_only_its_own_rollouts(client):
    await accept(client, rollout("a"), rollout("b", run_id="other"))
    assert list(await wait_for_all(client, 1)) == ["a"]
    assert list(await wait_for_all(client, 1, run_id="other")) == ["b"]


async def test_an_unknown_run_answers_at_once_with_nothing():
    async with running_app() as client, asyncio.timeout(5.0):
        nothing = await page(client, run_id="unknown", wait_s=30.0)
    assert (nothing.rollouts, nothing.unfinished) == ((), 0)


async def test_a_long_poll_wakes_when_a_rollout_ends():
    async with waiting_app(1) as (client, (policy,)), asyncio.timeout(10.0):
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
    async with waiting_app(1) as (client, _):
        await accept(client, rollout("a"), rollout("b", run_id="other"))
        await wait_for_all(client, 1)
        await wait_for_all(client, 1, run_id="other")
        await accept(client, rollout("c", **WAITING))
        answer = await post(client, "/rollouts/ack", run_id="r", rollout_ids=["a", "b", "c", "unknown"])
        assert answer == {"acked": ["a"], "unknown": ["b", "c", "unknown"]}
        gone = await client.get("/rollouts/a")
        assert (gone.status_code, gone.json()["code"]) == (404, "unknown_id")
        assert (await client.get("/rollouts/c")).json()["status"] == "running"


async def test_at_most_so_many_run_at_once_in_order_of_acceptance():
    async with waiting_app(3, max_concurrent_rollouts=2) as (client, policies):
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
    async with waiting_app(2, max_concurrent_rollouts=1) as (client, policies):
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


async def test_cancelling_in_the_moment_of_acceptance_ends_it_once(client):
    answers = await asyncio.gather(
        accept(client, rollout("a")), *(client.delete("/rollouts/a") for _ in range(3))
    )
    assert {answer.status_code for answer in answers[1:]} <= {200, 404}
    one = await page(client)
    assert ([ended.rollout_id for ended in one.rollouts], one.unfinished) == (["a"], 0)


async def test_the_end_of_the_service_ends_everything_and_answers_who_waits():
    async with waiting_app(2, max_concurrent_rollouts=1) as (client, policies), asyncio.timeout(10.0):
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
        await play(client, rollout("a"))
        client._transport.app.state.services.expire()
        assert (await client.get("/rollouts/a")).status_code == 404


async def test_an_outage_that_meets_the_deadline_fails_and_an_answer_ends_the_outage():
    def asking(rollout_id, url):
        config = {"inference_url": url, "model": "m", "max_attempts": 100}
        return rollout(
            rollout_id,
            env={"env_name": "counting", "config": {"length": 1_000_000}},
            policy={"policy_name": "openai", "config": config},
            limits={"timeout_s": 1.0, "max_decisions": 10_000},
        )

    async with (
        fake_inference(calling("a"), status(503, {})) as out,
        fake_inference(status(503, {}), calling("a")) as back,
        running_app() as client,
    ):
        found = await play(client, asking("out", out.url), asking("back", back.url))
    failure = found["out"].failure
    assert failure is not None
    assert (failure.code, failure.decisions_done) == ("inference_unavailable", 1)
    assert "status 503" in failure.detail
    answered = found["back"].trajectory
    assert answered is not None
    assert answered.stop_reason == "deadline"


LONG = {"env": {"env_name": "counting", "config": {"length": 1_000_000}}, "limits": {"max_decisions": 10_000}}


async def test_a_long_scripted_rollout_shares_the_time_and_can_be_cancelled_and_says_how_far_it_came():
    async with running_app() as client, asyncio.timeout(20.0):
        await accept(client, rollout("long", **LONG), rollout("short"))
        assert [one.rollout_id for one in (await page(client)).rollouts] == ["short"]
        state = (await client.delete("/rollouts/long")).json()
    assert (state["status"], state["failure"]["code"]) == ("cancelled", "cancelled")
    assert 0 < state["failure"]["decisions_done"] < 10_000


async def test_a_cancelled_rollout_leaves_the_queue_with_its_worker():
    async with waiting_app(3, max_concurrent_rollouts=1) as (client, policies):
        await accept(client, *(rollout(name, limits={"max_decisions": 1}, **WAITING) for name in "abc"))
        await policies[0].asked.wait()
        await client.delete("/rollouts/b")
        runner = client._transport.app.state.services.runner
        assert list(runner._queue) == ["c"]
        policies[0].go.set()
        policies[2].go.set()
        found = await wait_for_all(client, 3)
    assert {name: one.status for name, one in found.items()} == {
        "a": "finished", "b": "cancelled", "c": "finished",
    }  # fmt: skip
    assert not policies[1].asked.is_set()


@pytest.mark.parametrize("bound", ["max_held_bytes", "max_rollouts_held"])
async def test_held_results_are_bounded_until_they_are_acknowledged(bound):
    async with running_app(**{bound: 1}) as client:
        await play(client, rollout("a"))
        full = await accept(client, rollout("b"))
        assert (full.status_code, full.json()["code"]) == (429, "capacity_reached")
        assert full.headers["retry-after"] == "1"
        assert (await accept(client, rollout("a"))).json()["known"] == ["a"], "a retry takes no room"
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a"]})
        assert (await accept(client, rollout("b"))).status_code == 202


async def test_what_is_queued_counts_in_bytes_until_it_is_acknowledged_or_ended():
    policies, plug_boards = waiting_boards(3)
    # Two requests of some 10 kB: the second one fills what may be held.
    long = {"ground_truth": "x" * 10_000, **WAITING}
    bounds = {"max_held_bytes": 20_000, "max_concurrent_rollouts": 1}
    async with running_app(plug_boards, **bounds) as client:
        for name in ("a", "b"):
            assert (await accept(client, rollout(name, **long))).status_code == 202
        full = await accept(client, rollout("c", **long))
        assert (full.status_code, full.json()["code"]) == (429, "capacity_reached")
        await client.delete("/rollouts/b")
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["b"]})
        assert (await accept(client, rollout("c", **long))).status_code == 202
        for policy in policies:
            policy.go.set()
        await wait_for_all(client, 2)
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a", "c"]})
        assert client._transport.app.state.services.captures.held.total == 0


@pytest.mark.parametrize("way", ["finished", "failed", "broken", "deleted"])
async def test_of_a_rollout_that_ended_only_its_result_is_left_and_after_its_ack_nothing(way, live):
    waiting = WaitingPolicy()
    moves = {"finished": add("a"), "failed": PolicyUnavailable("gone"), "broken": add("boom")}
    policy = {"policy_name": "mine"}
    plug_boards = boards(mine=lambda: PlannedPolicy(moves[way]) if way in moves else waiting)
    async with running_app(plug_boards) as client:
        await accept(client, rollout("a", policy=policy, limits={"max_decisions": 1}))
        if way == "deleted":
            await waiting.asked.wait()
            await client.delete("/rollouts/a")
        await wait_for_all(client, 1)
        await live.until_gone(CountingEnvironment)
        assert live.count(Record) == 1
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a"]})
        await live.until_gone(Record)
        assert client._transport.app.state.services.captures.held.total == 0


async def test_a_page_is_bounded_in_bytes_but_holds_one_rollout_at_least():
    async def sizes(**settings):
        async with running_app(**settings) as client:
            await play(client, *(rollout(f"{i}") for i in range(4)))
            found, cursor = [], None
            while not found or found[-1]:
                one = await page(client, cursor)
                found.append(len(one.rollouts))
                cursor = one.cursor
            return found, len((await client.get("/rollouts/0")).content)

    _, size = await sizes()
    assert (await sizes(max_page_bytes=1))[0] == [1, 1, 1, 1, 0]
    # Room for two and a half: the timings in them differ by some digits.
    assert (await sizes(max_page_bytes=size * 5 // 2))[0] == [2, 2, 0]
