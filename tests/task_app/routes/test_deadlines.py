"""Nothing is waited for without end: steps and plug-ins that hang, clients that say nothing or too much."""

import asyncio
import json
import threading

import pytest

from task_app.errors import CapacityReached
from task_app.threads import Threads
from tests.task_app.counting import KEY, rollout, running_app
from tests.task_app.playing import new_policy, post, refused
from tests.task_app.rollout_client import accept, waiting_app
from tests.task_app.served import served_app
from tests.task_app.sessions.test_idempotency import CALLS, keyed, made, stepped
from tests.task_app.slow import Gates, slow_boards


async def step(client, env_id):
    return await client.post("/env/step", json={"env_id": env_id, "tool_calls": CALLS})


async def test_a_slow_step_is_answered_in_time_and_done_once_and_its_retry_gets_the_answer():
    gates = Gates()
    async with served_app(slow_boards(gates), request_deadline_s=0.5) as (client, _), asyncio.timeout(20.0):
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
        assert await post(client, "/env/terminate", env_id=hung) == {"ok": True}
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
    async with waiting_app(1, policy_deadline_s=0.05) as (client, (policy,)), asyncio.timeout(20.0):
        policy_id = await new_policy(client, "waiting", bound_env_id=await made(client))
        late = await refused(client, "/policy/step", keyed("p"), policy_id=policy_id)
        assert late[:2] == (504, "deadline_exceeded")
        policy.go.set()
        again = await post(client, "/policy/step", keyed("p"), policy_id=policy_id)
        assert again["meta"]["turn"] == 1


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


HEAD = f"POST /env/create HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\n".encode()


async def told(client, *parts, then_closed=True):
    """What the server answers to these bytes before it closes the connection."""
    reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
    for part in parts:
        writer.write(part)
    answer = await reader.read() if then_closed else await reader.readuntil(b"\r\n\r\n")
    writer.close()
    return answer


def problem(answer):
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"application/problem+json" in head.lower()
    return int(head.split()[1]), json.loads(body)["code"]


async def test_the_bounds_of_heads_bodies_and_connections_are_those_of_the_settings():
    bounds = {"max_header_s": 0.1, "max_header_bytes": 4_096, "max_body_s": 0.1, "max_connections": 1}
    async with served_app(**bounds) as (client, _), asyncio.timeout(20.0):
        assert await told(client, HEAD) == b""
        assert problem(await told(client, b"GET /" + b"y" * 5_000)) == (431, "head_too_large")
        half = HEAD + b'Content-Type: application/json\r\nContent-Length: 90\r\n\r\n{"env_name"'
        assert problem(await told(client, half)) == (408, "too_slow")
        keyed = HEAD + b'Idempotency-Key: k\r\nContent-Length: 90\r\n\r\n{"env_name"'
        assert problem(await told(client, keyed)) == (408, "too_slow")
        assert (await client.get("/health")).status_code == 200
        answer = await told(client)
        assert problem(answer) == (429, "capacity_reached")
        assert b"retry-after: 1" in answer
        assert (await client.get("/health")).status_code == 200


async def test_large_bodies_and_many_requests_on_one_connection_do_not_count_as_heads():
    async with served_app(max_header_bytes=4_096, max_header_s=0.2) as (client, _), asyncio.timeout(20.0):
        for _ in range(50):
            answer = await client.post("/env/create", json={"env_name": "counting", "x": "y" * 10_000})
            assert answer.status_code == 200


async def test_a_client_that_goes_away_in_the_middle_of_a_step_finds_it_done_once():
    gates = Gates()
    async with served_app(slow_boards(gates)) as (client, _), asyncio.timeout(20.0):
        env_id = await made(client, "slow")
        body = json.dumps({"env_id": env_id, "tool_calls": CALLS}, separators=(",", ":")).encode()
        head = f"POST /env/step HTTP/1.1\r\nHost: x\r\nX-API-Key: {KEY}\r\nIdempotency-Key: k\r\n"
        head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
        writer.write(head.encode() + body)
        await asyncio.to_thread(gates.entered.wait, 10.0)
        writer.transport.abort()
        gates.step.set()
        assert (await stepped(client, env_id, "k")).json()["info"]["turn"] == 1
        assert (await stepped(client, env_id, "another")).json()["info"]["turn"] == 2


async def test_while_it_drains_it_says_so_takes_nothing_new_and_lets_what_runs_end_and_be_fetched():
    gates = Gates()
    async with served_app(slow_boards(gates), drain_s=10.0) as (client, server), asyncio.timeout(20.0):
        long = {"env": {"env_name": "slow"}, "limits": {"max_decisions": 1}}
        await accept(client, rollout("a", **long))
        await asyncio.to_thread(gates.entered.wait, 10.0)
        server.should_exit = True
        while (health := await client.get("/health")).status_code == 200:
            pass
        assert (health.status_code, health.json()["code"]) == (503, "draining")
        for told in (
            await client.post("/env/create", json={"env_name": "counting"}),
            await accept(client, rollout("b")),
        ):
            assert (told.status_code, told.json()["code"]) == (503, "shutting_down")
            assert told.headers["retry-after"] == "5"
        gates.step.set()
        page = (await client.get("/rollouts", params={"run_id": "r", "wait_s": 10})).json()
        assert [one["status"] for one in page["rollouts"]] == ["finished"]
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a"]})
