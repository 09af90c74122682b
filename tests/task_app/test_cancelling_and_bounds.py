"""What is cancelled ends at once and is forgotten; what is held and sent is bounded in bytes."""

import asyncio

import pytest

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
from tests.task_app.rollout_client import WAITING, accept, page, wait_for_all, waiting_boards

LONG = {
    "env": {"env_name": "counting", "config": {"length": 1_000_000}},
    "limits": {"max_decisions": 10_000},
}


async def test_a_long_scripted_rollout_can_be_cancelled_and_says_how_far_it_came():
    async with running_app() as client, asyncio.timeout(10.0):
        await accept(client, rollout("a", **LONG))
        await asyncio.sleep(0.1)
        state = (await client.delete("/rollouts/a")).json()
    assert (state["status"], state["failure"]["code"]) == ("cancelled", "cancelled")
    assert 0 < state["failure"]["decisions_done"] < 10_000


async def test_scripted_rollouts_share_the_time():
    async with running_app() as client, asyncio.timeout(20.0):
        await accept(client, rollout("long", **LONG), rollout("short"))
        assert [one.rollout_id for one in (await page(client)).rollouts] == ["short"]
        await client.delete("/rollouts/long")


async def test_a_cancelled_rollout_leaves_the_queue_with_its_worker():
    policies, plug_boards = waiting_boards(3)
    async with running_app(plug_boards, max_concurrent_rollouts=1) as client:
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


async def test_held_results_are_bounded_in_bytes_until_they_are_acknowledged():
    async with running_app(max_held_bytes=1) as client:
        await accept(client, rollout("a"))
        await wait_for_all(client, 1)
        full = await accept(client, rollout("b"))
        assert (full.status_code, full.json()["code"]) == (429, "capacity_reached")
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
            await accept(client, *(rollout(f"{i}") for i in range(4)))
            await wait_for_all(client, 4)
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
