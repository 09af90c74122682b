"""OpenEnv's socket on a real port, with a client that knows nothing of OpenEnv."""

import json

import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from task_app.plugins import default_plug_boards
from tests.task_app.counting import KEY
from tests.task_app.served import served_app

MAX_BYTES = 4_096


@pytest.fixture
async def http():
    async with served_app(default_plug_boards(), max_body_bytes=MAX_BYTES) as (client, _):
        yield client


def opened(http, key=KEY):
    address = f"ws://{http.base_url.host}:{http.base_url.port}/openenv/crafter/ws"
    return connect(address, additional_headers={"X-API-Key": key}, proxy=None)


async def asked(client, kind, **data):
    await client.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await client.recv())["data"]


async def test_a_handshake_without_a_good_key_is_a_problem_with_status_401(http):
    with pytest.raises(InvalidStatus) as refused:
        async with opened(http, key="wrong"):
            pass
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body)["code"] == "unauthorised"


async def test_a_client_that_dies_leaves_no_session(http):
    async with opened(http) as client:
        env_id = (await asked(client, "reset", seed=1))["metadata"]["session_id"]
        assert (await http.get(f"/env/{env_id}/frame")).status_code == 200
        client.transport.abort()  # no closing handshake: what a dying process leaves
    while (await http.get(f"/env/{env_id}/frame")).status_code == 200:
        pass
    assert 'turnwise_sessions{kind="env"} 0.0' in (await http.get("/metrics")).text


async def test_a_message_above_the_bound_closes_the_socket_and_forgets_its_session(http):
    async with opened(http) as client:
        env_id = (await asked(client, "reset"))["metadata"]["session_id"]
        with pytest.raises(ConnectionClosed) as closed:
            await asked(client, "step", actions=["x" * MAX_BYTES])
        assert closed.value.rcvd.code == 1009
    while (await http.get(f"/env/{env_id}/frame")).status_code == 200:
        pass
