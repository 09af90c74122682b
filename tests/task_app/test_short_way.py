"""The short way of /env/step answers byte for byte as the long one, and leaves the rest as it came."""

import asyncio
import json

import pytest

from task_app.plugins import EnvironmentPlugin, PlugBoards
from task_app.routes.steps import answer_at_once
from tests.task_app.counting import KEY, CountingConfig, CountingEnvironment, boards
from tests.task_app.playing import ON
from tests.task_app.served import served_app
from tests.task_app.test_env_routes import calls, created

JSON = {"Content-Type": "application/json"}


class QuickEnvironment(CountingEnvironment):
    """The counting environment, which needs no thread."""

    quick_step = True


def quick_boards() -> PlugBoards:
    plugged = boards()
    return PlugBoards(
        {**plugged.environments, "quick": EnvironmentPlugin(CountingConfig, QuickEnvironment)},
        plugged.policies,
    )


@pytest.fixture
async def client():
    async with served_app(quick_boards()) as (client, _):
        yield client


def build_body(env_id, tool_calls):
    return json.dumps({"env_id": env_id, "tool_calls": tool_calls}).encode()


async def stepped(client, content, **headers):
    return await client.post("/env/step", content=content, headers=JSON | headers)


async def made(client):
    return (await created(client, env_name="quick"))["env_id"]


DECISIONS = [
    calls("a"),
    calls("a", "b", "x"),
    [],
    [{"tool": "nothing"}],
    [{"function": {"name": "add", "arguments": '{"names": ["a"]}'}}],
    [{"function": {"name": "add", "arguments": "no JSON"}}],
    [{"tool": "add", "args": {"names": ["ä \U0001f600"]}}],
    [{"args": {}}],
    [{"tool": 7}],
    [{"tool": "add", "args": {"names": []}}] * 17,
    calls("boom"),
    calls("end"),
    calls("a"),
]


@pytest.mark.parametrize("switches", [{}, {"step_rewards": ON}])
async def test_both_ways_give_the_same_answers_decision_by_decision(client, switches):
    # An Idempotency-Key sends a request the long way.
    short = (await created(client, env_name="quick", config=switches))["env_id"]
    long = (await created(client, env_name="quick", config=switches))["env_id"]
    for number, decision in enumerate(DECISIONS):
        here = await stepped(client, build_body(short, decision))
        there = await stepped(client, build_body(long, decision), **{"Idempotency-Key": str(number)})
        assert (here.status_code, here.content) == (there.status_code, there.content), decision
        assert here.headers["content-type"] == there.headers["content-type"]
        assert here.headers.get("retry-after") == there.headers.get("retry-after")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"{",
        b'{"env_id": "%s"}',
        b'{"env_id": 7, "tool_calls": []}',
        b'{"env_id": "", "tool_calls": []}',
        b'{"env_id": "unknown", "tool_calls": []}',
        b'{"env_id": "%s", "tool_calls": {}}',
        b'{"env_id": "%s", "tool_calls": [7]}',
        b'{"env_id": "%s", "tool_call": []}',
        b'{"env_id": "%s", "tool_calls": [], "parent_env_id": "x"}',
        b'{"env_id": "%s", "tool_calls": [{"tool": "add", "args": {"names": ["\\ud800"]}}]}',
        b'{"env_id": "%s", "tool_calls": [{"tool": "add", "args": {"names": [], "n": NaN}}]}',
        b'{"env_id": "%s", "tool_calls": ' + b"[" * 5_000 + b"]" * 5_000 + b"}",
        b'{"env_id": "' + b"x" * 201 + b'", "tool_calls": []}',
    ],
)
async def test_what_a_strange_body_is_told_does_not_depend_on_the_way(client, content):
    told = []
    for headers in ({}, {"Idempotency-Key": "k"}):
        env_id = await made(client)
        answer = await stepped(client, content.replace(b"%s", env_id.encode()), **headers)
        told.append((answer.status_code, answer.text.replace(env_id, "ID")))
    assert told[0] == told[1]


def test_a_request_with_a_key_is_passed_on_before_its_body_is_read():
    reads = []
    scope = {"headers": [(b"idempotency-key", b"k")]}
    assert answer_at_once(None, lambda *given: reads.append(given), scope, b"{}") is None
    assert reads == []


async def test_a_body_that_comes_in_pieces_is_put_together(client):
    whole = build_body(await made(client), calls("a"))

    async def pieces():
        yield whole[:10]
        yield whole[10:]

    answer = await stepped(client, pieces())
    assert (answer.status_code, answer.json()["step_idx"]) == (200, 1)


async def test_a_session_that_is_held_is_waited_for_and_others_go_on():
    async with served_app(quick_boards()) as (client, server):
        held, other = [await made(client) for _ in range(2)]
        session = server.config.app.state.services.environments.find(held)
        async with session.lock:
            waiting = asyncio.create_task(stepped(client, build_body(held, calls("a"))))
            answer = await stepped(client, build_body(other, calls("a")))
            assert (answer.status_code, waiting.done(), session.step_idx) == (200, False, 0)
        assert ((await waiting).status_code, session.step_idx) == (200, 1)


async def test_both_ways_have_the_same_head_and_are_counted_under_the_same_route(client):
    body, given = build_body(await made(client), calls("a")), {"X-Request-ID": "mine"}
    ways = (given, given | {"Idempotency-Key": "k"})
    heads = [(await stepped(client, body, **way)).headers for way in ways]
    text = (await client.get("/metrics")).text
    assert heads[0]["x-request-id"] == "mine"
    assert [sorted(head) for head in heads] == [sorted(heads[0])] * 2
    assert 'turnwise_http_requests_total{method="POST",route="/env/step",status="200"} 2.0' in text


def build_request(body, *headers):
    """A step as a plain client sends it."""
    head = [b"POST /env/step HTTP/1.1", b"Host: localhost", b"X-API-Key: " + KEY.encode(), *headers]
    head += [b"Content-Type: application/json", b"Content-Length: %d" % len(body)]
    return b"\r\n".join([*head, b"", body])


async def answers(reader, count):
    """The step numbers of so many replies, in their order."""
    numbers = []
    for _ in range(count):
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r")[0])
        numbers.append(json.loads(await reader.readexactly(length))["step_idx"])
    return numbers


async def test_requests_that_follow_each_other_at_once_are_answered_in_order_whatever_their_way(client):
    body = build_body(await made(client), calls("a"))
    reader, writer = await asyncio.open_connection("127.0.0.1", client.base_url.port)
    short, long = build_request(body), build_request(body, b"Idempotency-Key: k")
    writer.write(short + long + short + short)
    assert await answers(reader, 4) == [1, 2, 3, 4]
    writer.write(short[:40])
    await asyncio.sleep(0)
    writer.write(short[40:-5])
    await asyncio.sleep(0)
    writer.write(short[-5:] + short)
    assert await answers(reader, 2) == [5, 6]
    writer.write(build_request(body, b"Connection: close"))
    assert await answers(reader, 1) == [7]
    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize(
    ("headers", "status"), [({"X-API-Key": "wrong"}, 401), ({"Content-Type": "text/plain"}, 422)]
)
async def test_what_the_gate_refuses_is_refused_before_a_step_at_once(client, headers, status):
    body = build_body(await made(client), calls("a"))
    refusal, answer = await stepped(client, body, **headers), await stepped(client, body)
    assert (refusal.status_code, answer.json()["step_idx"]) == (status, 1)


async def test_a_fault_of_the_service_is_a_500_that_is_counted_and_the_connection_ends(client, monkeypatch):
    def fault(*_):
        raise KeyError("ours")

    monkeypatch.setattr("task_app.routes.steps.step_json", fault)
    answer = await stepped(client, build_body(await made(client), calls("a")))
    text = (await client.get("/metrics")).text
    assert (answer.status_code, answer.json()["code"]) == (500, "internal_error")
    assert answer.headers["connection"] == "close"
    assert 'turnwise_http_requests_total{method="POST",route="/env/step",status="500"} 1.0' in text
