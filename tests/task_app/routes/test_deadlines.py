"""Nothing is waited for without end, and what is given up on leaves a session that is whole."""

import asyncio
import threading

import pytest

from task_app.errors import CapacityReached, CriticalError
from task_app.threads import Threads
from tests.task_app.counting import WaitingPolicy, running_app
from tests.task_app.served import served_app
from tests.task_app.sessions.test_idempotency import CALLS, keyed, made, stepped
from tests.task_app.slow import Gates, slow_boards


async def step(client, env_id):
    return await client.post("/env/step", json={"env_id": env_id, "tool_calls": CALLS})


async def test_a_slow_step_is_answered_in_time_and_done_once_and_its_retry_gets_the_answer():
    gates = Gates()
    async with (
        served_app(slow_boards(gates), request_deadline_s=0.5) as (client, _),
        asyncio.timeout(20.0),
    ):
        env_id = await made(client, "slow")
        late = await stepped(client, env_id, "k")
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        gates.step.set()
        while (again := await stepped(client, env_id, "k")).status_code == 504:
            pass
        assert (again.status_code, again.json()["info"]["turn"]) == (200, 1)
    assert gates.calls == 1


async def test_a_request_behind_a_hung_step_does_nothing_and_says_so_and_others_go_on():
    gates = Gates()
    async with (
        running_app(slow_boards(gates), request_deadline_s=5.0, session_wait_s=0.05) as client,
        asyncio.timeout(20.0),
    ):
        hung, other = await made(client, "slow"), await made(client)
        held = asyncio.create_task(step(client, hung))
        await asyncio.to_thread(gates.entered.wait, 10.0)
        busy = await step(client, hung)
        assert (busy.status_code, busy.json()["code"]) == (503, "session_busy")
        assert busy.headers["retry-after"] == "1"
        assert (await step(client, other)).status_code == 200
        assert (await client.post("/env/terminate", json={"env_id": hung})).json() == {"ok": True}
        gates.step.set()
        assert (await held).json()["info"]["turn"] == 1
    assert gates.calls == 1


async def test_a_request_that_is_cancelled_in_the_middle_leaves_its_step_whole():
    gates = Gates()
    async with running_app(slow_boards(gates)) as client, asyncio.timeout(20.0):
        env_id = await made(client, "slow")
        gone = asyncio.create_task(step(client, env_id))
        await asyncio.to_thread(gates.entered.wait, 10.0)
        gone.cancel()
        gates.step.set()
        assert (await step(client, env_id)).json()["info"]["turn"] == 2
    assert gates.calls == 2


async def test_a_policy_that_never_decides_is_given_up_on_and_asked_again():
    policies = []

    def waiting():
        policies.append(WaitingPolicy())
        return policies[-1]

    gates = Gates()
    async with (
        running_app(slow_boards(gates, waiting=waiting), policy_deadline_s=0.05) as client,
        asyncio.timeout(20.0),
    ):
        env_id = await made(client)
        body = {"policy_name": "waiting", "bound_env_id": env_id}
        policy_id = (await client.post("/policy/create", json=body)).json()["policy_id"]
        late = await client.post("/policy/step", json={"policy_id": policy_id}, headers=keyed("p"))
        assert (late.status_code, late.json()["code"]) == (504, "deadline_exceeded")
        policies[0].go.set()
        again = await client.post("/policy/step", json={"policy_id": policy_id}, headers=keyed("p"))
        assert (again.status_code, again.json()["meta"]["turn"]) == (200, 1)


async def test_calls_that_hang_lose_their_place_and_too_many_of_them_stop_new_ones():
    threads, opened = Threads(most=1, stuck_after_s=0.02), threading.Event()
    async with asyncio.timeout(20.0):
        hung = asyncio.create_task(threads.run("hung", opened.wait, 15.0))
        while not threads.stuck_count:
            await asyncio.sleep(0)
        with pytest.raises(CapacityReached, match="1 calls of plug-ins hang"):
            await threads.run("next", int)
        opened.set()
        assert await hung is True
        while threads.stuck_count:
            await asyncio.sleep(0)
        assert await threads.run("next", int, "7") == 7


async def test_a_call_that_is_awaited_no_more_loses_its_place():
    threads, opened = Threads(most=2, stuck_after_s=3600.0), threading.Event()
    async with asyncio.timeout(20.0):
        for _ in range(2):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.0):
                    await threads.run("hung", opened.wait, 15.0)
        while threads.stuck_count < 2:
            await asyncio.sleep(0)
        opened.set()
        while threads.stuck_count:
            await asyncio.sleep(0)
        assert await threads.run("next", int, "7") == 7


async def test_what_a_call_in_a_thread_raises_is_raised():
    with pytest.raises(CriticalError, match=r"int raised ValueError: invalid literal"):
        await Threads(most=1, stuck_after_s=1.0).run("int", int, "seven")
