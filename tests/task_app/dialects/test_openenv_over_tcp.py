"""OpenEnv's socket on a real port, with a client that knows nothing of OpenEnv."""

import json
import socket

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from tests.task_app.counting import KEY
from tests.task_app.test_service_process import task_app

MAX_BYTES = 4_096


@pytest.fixture(scope="module")
def http():
    with task_app(TURNWISE_MAX_BODY_BYTES=str(MAX_BYTES)) as (_, client):
        yield client


def opened(http, key=KEY, **headers):
    address = f"ws://{http.base_url.host}:{http.base_url.port}/openenv/crafter/ws"
    return connect(address, additional_headers={"X-API-Key": key, **headers}, proxy=None)


def asked(client, kind, **data):
    client.send(json.dumps({"type": kind, "data": data}))
    return json.loads(client.recv(timeout=20))["data"]


def test_a_handshake_without_a_good_key_is_a_problem_with_status_401(http):
    with pytest.raises(InvalidStatus) as refused, opened(http, key="wrong"):
        pass
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body)["code"] == "unauthorised"


def test_a_client_that_dies_leaves_no_session(http):
    with opened(http) as client:
        env_id = asked(client, "reset", seed=1)["metadata"]["session_id"]
        assert http.get(f"/env/{env_id}/frame").status_code == 200
        client.socket.shutdown(socket.SHUT_RDWR)  # no closing handshake: what a dying process leaves
    while http.get(f"/env/{env_id}/frame").status_code == 200:
        pass
    assert 'turnwise_sessions{kind="env"} 0.0' in http.get("/metrics").text


def test_a_message_above_the_bound_closes_the_socket_and_forgets_its_session(http):
    with opened(http) as client:
        env_id = asked(client, "reset")["metadata"]["session_id"]
        with pytest.raises(ConnectionClosed) as closed:
            asked(client, "step", actions=["x" * MAX_BYTES])
        assert closed.value.rcvd.code == 1009
    while http.get(f"/env/{env_id}/frame").status_code == 200:
        pass
