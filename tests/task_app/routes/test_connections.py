"""Clients that say nothing, or too much, over real sockets, within the bounds of a task app's settings."""

import asyncio
import json

from tests.task_app.counting import KEY, rollout
from tests.task_app.rollout_client import accept
from tests.task_app.served import served_app
from tests.task_app.sessions.test_idempotency import CALLS, made, stepped
from tests.task_app.slow import Gates, slow_boards

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


async def test_the_bounds_of_a_head_are_those_of_the_settings():
    async with served_app(max_header_s=0.1, max_header_bytes=4_096) as (client, _), asyncio.timeout(20.0):
        assert await told(client, HEAD) == b""
        assert problem(await told(client, b"GET /" + b"y" * 5_000)) == (431, "head_too_large")


async def test_a_body_that_never_ends_is_answered():
    async with served_app(max_body_s=0.1) as (client, _), asyncio.timeout(20.0):
        half = HEAD + b'Content-Type: application/json\r\nContent-Length: 90\r\n\r\n{"env_name"'
        assert problem(await told(client, half)) == (408, "too_slow")
        keyed = HEAD + b'Idempotency-Key: k\r\nContent-Length: 90\r\n\r\n{"env_name"'
        assert problem(await told(client, keyed)) == (408, "too_slow")


async def test_large_bodies_and_many_requests_on_one_connection_do_not_count_as_heads():
    async with served_app(max_header_bytes=4_096, max_header_s=0.2) as (client, _), asyncio.timeout(20.0):
        for _ in range(50):
            answer = await client.post("/env/create", json={"env_name": "counting", "x": "y" * 10_000})
            assert answer.status_code == 200


async def test_more_connections_than_are_allowed_are_told_to_come_later():
    async with served_app(max_connections=1) as (client, _), asyncio.timeout(20.0):
        assert (await client.get("/health")).status_code == 200
        answer = await told(client)
        assert problem(answer) == (429, "capacity_reached")
        assert b"retry-after: 1" in answer
        assert (await client.get("/health")).status_code == 200


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
        for refused in (
            await client.post("/env/create", json={"env_name": "counting"}),
            await accept(client, rollout("b")),
        ):
            assert (refused.status_code, refused.json()["code"]) == (503, "shutting_down")
            assert refused.headers["retry-after"] == "5"
        gates.step.set()
        page = (await client.get("/rollouts", params={"run_id": "r", "wait_s": 10})).json()
        assert [one["status"] for one in page["rollouts"]] == ["finished"]
        await client.post("/rollouts/ack", json={"run_id": "r", "rollout_ids": ["a"]})
