"""/rollouts and /run: same id = same rollout, delivered until acknowledged; bounds, cancels and aborts."""

import asyncio

import pytest

from shared_schemas.rollouts import Rollout
from task_app.errors import PolicyUnavailable
from task_app.rollouts.results import Record
from task_app.rollouts.runs import Runs
from tests.task_app.counting import (
    CountingEnvironment,
    PlannedPolicy,
    WaitingPolicy,
    add,
    boards,
    rollout,
    running_app,
)
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


async def test_a_page_is_bounded_in_rollouts_and_bytes_but_holds_one_at_least():
    async def sizes(**settings):
        async with running_app(**settings) as client:
            await play(client, *(rollout(f"{i}") for i in range(5)))
            found, cursor = [], None
            while not found or found[-1]:
                one = await page(client, cursor)
                found.append(len(one.rollouts))
                cursor = one.cursor
            return found, len((await client.get("/rollouts/0")).content)

    found, size = await sizes(max_page_rollouts=2)
    assert found == [2, 2, 1, 0]
    assert (await sizes(max_page_bytes=1))[0] == [1, 1, 1, 1, 1, 0]
    # Room for two and a half: the timings in them differ by some digits.
    assert (await sizes(max_page_bytes=size * 5 // 2))[0] == [2, 2, 1, 0]


@pytest.mark.parametrize("cursor", ["0123456789abcdef.3", "nonsense", "x.y.z", "."])
async def test_a_cursor_of_another_instance_has_expired(client, cursor):
    answer = await client.get("/rollouts", params={"run_id": "r", "cursor": cursor})
    assert (answer.status_code, answer.json()["code"]) == (409, "cursor_expired")


@pytest.mark.parametrize("seconds", ["6", "NaN", "Infinity", "1e999", "-0.5"])
async def test_a_wait_is_a_number_of_seconds_that_is_allowed(seconds):
    async with running_app(max_wait_s=5.0) as client:
        answer = await client.get("/rollouts", params={"run_id": "r", "wait_s": seconds})
    assert (answer.status_code, answer.json()["where"]) == (422, "wait_s")
    assert ("at most 5" in answer.json()["detail"]) == (seconds == "6")


async def test_a_long_poll_wakes_when_a_rollout_ends_and_an_unknown_run_answers_at_once():
    async with waiting_app(1) as (client, (policy,)), asyncio.timeout(10.0):
        unknown = await page(client, run_id="unknown", wait_s=30.0)
        assert (unknown.rollouts, unknown.unfinished) == ((), 0)
        await accept(client, rollout("a", limits={"max_decisions": 1}, **WAITING))
        nothing = await page(client, wait_s=0.05)
        assert (nothing.rollouts, nothing.unfinished) == ((), 1), "a poll ends with its time"
        polls = [asyncio.create_task(page(client, wait_s=30.0)) for _ in range(3)]
        await policy.asked.wait()
        assert not any(poll.done() for poll in polls)
        policy.go.set()
        for poll in polls:
            assert [one.rollout_id for one in (await poll).rollouts] == ["a"]


async def test_acknowledged_rollouts_are_forgotten_and_others_are_named():
    async with waiting_app(1) as (client, _):
        await accept(client, rollout("a"), rollout("b", run_id="other"))
        assert list(await wait_for_all(client, 1)) == ["a"], "a run sees its own alone"
        assert list(await wait_for_all(client, 1, run_id="other")) == ["b"]
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
        queue = client._transport.app.state.services.runner._queue
        for name, words in (("waits", "before it started"), ("runs", "while it ran")):
            for _ in range(2):
                state = (await client.delete(f"/rollouts/{name}")).json()
                assert (state["status"], state["failure"]["code"]) == ("cancelled", "cancelled")
                assert words in state["failure"]["detail"]
                assert "waits" not in queue, "it takes no place among those that wait"
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


LONG = {"env": {"env_name": "counting", "config": {"length": 1_000_000}}, "limits": {"max_decisions": 10_000}}


async def test_a_long_scripted_rollout_shares_the_time_and_can_be_cancelled_and_says_how_far_it_came():
    async with running_app() as client, asyncio.timeout(20.0):
        await accept(client, rollout("long", **LONG), rollout("short"))
        assert [one.rollout_id for one in (await page(client)).rollouts] == ["short"]
        state = (await client.delete("/rollouts/long")).json()
    assert (state["status"], state["failure"]["code"]) == ("cancelled", "cancelled")
    assert 0 < state["failure"]["decisions_done"] < 10_000


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
