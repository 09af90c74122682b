"""OpenEnv's WebSocket and HTTP routes, held against what its own server (openenv 0.10.0) answered.

`openenv_0_10.json` was recorded with a server of that package and an environment of two lines; names that
depend on the environment (`text`, `metadata` inside) differ, the envelopes must not.
"""

import json
from contextlib import contextmanager
from pathlib import Path

import jsonschema
import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from task_app.app import create_app
from task_app.plugins import default_plug_boards
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards
from tests.task_app.served import served_app

RECORDED = json.loads((Path(__file__).parent / "openenv_0_10.json").read_text(encoding="utf-8"))
WOOD = {"actions": ["move_right", "move_right", "move_right", "do"]}
CALL = {"tool_name": "add", "arguments": {"names": ["a"]}}


@contextmanager
def client(plug_boards=None, **settings):
    app = create_app(Settings(api_keys=(KEY,), **settings), boards=plug_boards or default_plug_boards())
    with TestClient(app, headers={"X-API-Key": KEY}) as http:
        yield http


@contextmanager
def talking(path="/openenv/crafter/ws", plug_boards=None, **settings):
    """A client and an open socket."""
    with client(plug_boards, **settings) as http, http.websocket_connect(path) as socket:
        yield http, socket


def asked(socket, kind, data=None):
    socket.send_json({"type": kind} | ({} if data is None else {"data": data}))
    return socket.receive_json()


def shape(value):
    """Keys and JSON types, down to what the environment itself names."""
    if isinstance(value, dict):
        inner = {name: shape(one) for name, one in value.items() if name not in ("observation", "metadata")}
        return inner | {name: "object" for name in ("observation", "metadata") if name in value}
    return type(value).__name__


def fits(recorded, ours):
    """Everything that a client of the recorded answer can read is there, of the same type."""
    if isinstance(recorded, dict) and isinstance(ours, dict):
        return all(name in ours and fits(recorded[name], ours[name]) for name in recorded)
    return recorded == ours or recorded == "NoneType"


def test_every_recorded_message_of_a_socket_is_answered_alike():
    with talking("/openenv/counting/ws", boards()) as (_, socket):
        for one in RECORDED["socket"]:
            socket.send_text(one["sent"].replace('{"names":["a"]}', json.dumps(CALL)))
            answer, recorded = socket.receive_json(), one["answer"]
            assert answer["type"] == recorded["type"]
            assert fits(shape(recorded), shape(answer)), (recorded, answer)
            assert answer["data"].get("code") == recorded["data"].get("code")
            if recorded["type"] == "state":
                assert answer["data"]["step_count"] == recorded["data"]["step_count"]
                assert answer["data"]["episode_id"] == recorded["data"]["episode_id"]


def test_every_recorded_request_is_answered_alike():
    with client(boards()) as http:
        for one in RECORDED["http"]:
            body = one["body"]
            if one["path"] == "/step":
                # Its own server steps an environment that it made for this request; ours wants a session.
                session_id = http.post("/openenv/counting/reset").json()["metadata"]["session_id"]
                body = {"session_id": session_id, "action": CALL}
            answer = http.request(one["method"], f"/openenv/counting{one['path']}", json=body)
            assert answer.status_code == one["status"]
            recorded = one["answer"]
            assert fits(shape(recorded), shape(answer.json())), (recorded, answer.json())
            assert recorded.get("error", {}).get("code") == answer.json().get("error", {}).get("code")


def test_a_decision_earns_what_the_service_says_it_earns_in_answers_that_fit_the_published_schemas():
    # seed 17: a tree stands four cells to the right (docs/http.md)
    switches = {"enabled": True, "mode": "decision_stepwise"}
    with talking() as (http, socket):
        start = asked(socket, "reset", {"seed": 17, "config": {"step_rewards": switches}})["data"]
        listed = asked(socket, "step", {"type": "list_tools"})["data"]["observation"]["tools"]
        untouched = asked(socket, "state")["data"]
        step = asked(socket, "step", WOOD)["data"]
        state = asked(socket, "state")["data"]
        schema = http.get("/openenv/crafter/schema").json()
    assert [tool["name"] for tool in listed] == ["interact_many"]
    assert "actions" in listed[0]["input_schema"]["properties"]
    assert (untouched["step_count"], state["step_count"]) == (0, 1), "to list the tools is no decision"
    assert (start["reward"], start["done"], start["metadata"]["seed"]) == (None, False, 17)
    assert (step["reward"], step["done"]) == (1.0, False)
    assert step["metadata"]["decision_rewards"]["unique"] == ["collect_wood"]
    assert step["metadata"]["achievements_added"] == ["collect_wood"]
    assert step["metadata"]["env_rewards"] == [0.0, 0.0, 0.0, 1.0]
    assert step["observation"]["metadata"] == step["metadata"]
    assert sorted(schema) == RECORDED["schema_keys"]
    jsonschema.validate(WOOD, schema["action"])
    jsonschema.validate(state, schema["state"])
    for answer, name in ((start, "reset_observation"), (step, "observation")):
        seen = answer["observation"] | {"done": answer["done"], "reward": answer["reward"]}
        jsonschema.validate(seen, schema[name])


def test_an_environment_describes_itself_as_a_server_of_its_own():
    with client() as http:
        found = http.get("/openenv/crafter/openapi.json").json()
    assert {"/reset", "/step", "/state", "/schema", "/metadata", "/health", "/mcp"} <= found["paths"].keys()
    assert found["servers"] == [{"url": "http://testserver/openenv/crafter"}]
    assert not [path for path in found["paths"] if "{" in path]


def test_every_form_of_an_action_is_the_same_decision():
    call = {"tool_name": "interact_many", "arguments": WOOD}
    told = {"tool_name": "interact_many", "result": "executed: move_right, move_right, move_right, do; "}
    with talking() as (_, socket):
        for action, shown in (
            (call, {}),
            ({"tool_calls": [{"tool": "interact_many", "args": WOOD}], "metadata": {"of": "Action"}}, {}),
            ({"type": "call_tool", **call}, told),
        ):
            asked(socket, "reset", {"seed": 17})
            step = asked(socket, "step", action)["data"]
            assert step["reward"] == 1.0
            assert all(step["observation"][name].startswith(value) for name, value in shown.items())


def test_unread_keys_are_named_and_misspelt_ones_refused():
    with talking() as (_, socket):
        answer = asked(socket, "reset", {"seed": 1, "difficulty": "hard"})["data"]
        refused = asked(socket, "reset", {"sed": 1})["data"]
    assert answer["metadata"]["ignored"] == ["difficulty"]
    assert refused["code"] == "VALIDATION_ERROR"
    assert "Did you mean 'seed'?" in refused["message"]


def test_a_session_ends_with_its_socket_or_a_new_config_which_makes_a_new_environment():
    with client() as http:
        with http.websocket_connect("/openenv/crafter/ws") as socket:
            first = asked(socket, "reset", {"seed": 1})["data"]["metadata"]["session_id"]
            assert http.get(f"/env/{first}/frame").status_code == 200
            answer = asked(socket, "reset", {"config": {"text": "compact"}})["data"]
            second = answer["metadata"]["session_id"]
            assert http.get(f"/env/{first}/frame").status_code == 404
            assert http.get(f"/env/{second}/frame").status_code == 200
        assert http.get(f"/env/{second}/frame").status_code == 404
    assert len(answer["observation"]["text"].split()) < 80


def test_a_socket_may_join_a_session_and_leaves_it_as_it_is():
    with client() as http:
        env_id = http.post("/openenv/crafter/reset", json={"seed": 17}).json()["metadata"]["session_id"]
        with http.websocket_connect(f"/openenv/crafter/ws?session_id={env_id}") as socket:
            assert asked(socket, "step", WOOD)["data"]["reward"] == 1.0
        body = {"session_id": env_id, "action": {"actions": ["noop"]}, "timeout_s": 3.0}
        step = http.post("/openenv/crafter/step", json=body).json()
        state = http.get("/openenv/crafter/state", params={"session_id": env_id}).json()
    assert step["metadata"]["ignored"] == ["timeout_s"]
    assert (state["step_count"], state["env_steps"]) == (2, 5)


def test_an_expired_session_is_told_and_the_socket_closes():
    with talking() as (http, socket):
        env_id = asked(socket, "reset", {})["data"]["metadata"]["session_id"]
        http.post("/env/terminate", json={"env_id": env_id})
        error = asked(socket, "step", {"actions": ["noop"]})["data"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert (error["code"], error["problem"]) == ("SESSION_ERROR", "unknown_id")


def test_a_socket_that_says_nothing_is_closed():
    with talking(session_idle_s=0.01) as (_, socket):
        error = socket.receive_json()["data"]
        with pytest.raises(WebSocketDisconnect):
            socket.receive_json()
    assert error["code"] == "SESSION_ERROR"
    assert "idle for 0.01 s" in error["message"]


def test_a_full_service_says_so_and_room_is_made_by_the_next_that_leaves():
    with client(max_sessions=1) as http:
        with http.websocket_connect("/openenv/crafter/ws") as first:
            asked(first, "reset", {})
            with http.websocket_connect("/openenv/crafter/ws") as second:
                assert second.receive_json()["data"]["code"] == "CAPACITY_REACHED"
        with http.websocket_connect("/openenv/crafter/ws") as third:
            assert asked(third, "reset", {})["type"] == "observation"


def test_what_cannot_be_read_is_an_error_frame_and_the_socket_goes_on():
    with talking() as (_, socket):
        for sent, code in (
            ("[]", "UNKNOWN_TYPE"),
            ('{"type": "step", "data": 3}', "VALIDATION_ERROR"),
            ('{"type": "step", "data": {"actions": ["noop"]}}', "EXECUTION_ERROR"),
            ("[" * 100_000, "INVALID_JSON"),
            ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
            ('{"type": "reset", "data": {"config": {"lenth": 3}}}', "VALIDATION_ERROR"),
            ('{"type": "stat\\ud83d"}', "INVALID_JSON"),
        ):
            socket.send_text(sent)
            assert socket.receive_json()["data"]["code"] == code
        assert asked(socket, "reset", {})["type"] == "observation"


def test_a_binary_frame_and_one_that_is_too_large_are_refused():
    with talking(max_body_bytes=1_024) as (_, socket):
        socket.send_bytes(b"{}")
        assert socket.receive_json()["data"]["code"] == "INVALID_JSON"
        socket.send_text(" " * 1_025)
        assert socket.receive_json()["data"]["code"] == "VALIDATION_ERROR"


def test_after_the_end_a_step_is_refused_and_a_reset_goes_on():
    end = {"tool_name": "add", "arguments": {"names": ["end"]}}
    with talking("/openenv/counting/ws", boards()) as (_, socket):
        asked(socket, "reset", {})
        assert asked(socket, "step", end)["data"]["done"] is True
        assert asked(socket, "step", end)["data"]["problem"] == "episode_over"
        assert asked(socket, "state")["data"]["done"] is True
        assert asked(socket, "reset", {})["data"]["done"] is False


def test_an_unknown_environment_is_told_where_the_client_reads_it():
    with talking("/openenv/craftr/ws") as (http, socket):
        error = socket.receive_json()["data"]
        assert http.get("/openenv/craftr/health").status_code == 422
    assert error["code"] == "FACTORY_ERROR"
    assert "Did you mean 'crafter'?" in error["message"]


def test_mcp_calls_a_tool_in_a_session_of_its_own():
    def rpc(http, method, **params):
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return http.post("/openenv/crafter/mcp", json=message).json()

    with client() as http:
        session_id = rpc(http, "openenv/session/create")["result"]["session_id"]
        with http.websocket_connect(f"/openenv/crafter/ws?session_id={session_id}") as socket:
            asked(socket, "reset", {"seed": 17})
        tools = rpc(http, "tools/list", session_id=session_id)["result"]["tools"]
        call = {"session_id": session_id, "name": "interact_many", "arguments": WOOD}
        called = rpc(http, "tools/call", **call)["result"]
        closed = rpc(http, "openenv/session/close", session_id=session_id)["result"]
        gone = rpc(http, "tools/call", **call)["error"]
    assert [tool["name"] for tool in tools] == ["interact_many"]
    assert (called["reward"], called["done"], called["error"]) == (1.0, False, None)
    assert called["result"].endswith("unlocked collect_wood")
    assert closed == {"session_id": session_id, "closed": True}
    assert (gone["code"], gone["data"]["problem"]) == (-32602, "unknown_id")


def test_an_operator_may_open_these_routes_alone():
    # Without a key a handshake is a 401, as a test below says.
    with client(open_routes=("openenv",)) as http:
        http.headers.pop("X-API-Key")
        with http.websocket_connect("/openenv/crafter/ws") as socket:
            assert asked(socket, "reset", {})["type"] == "observation"
        assert http.get("/info").status_code == 401
        assert http.get("/openenvious").status_code == 401


# On a real port, with a client that knows nothing of OpenEnv.
MAX_BYTES = 4_096


@pytest.fixture
async def http():
    async with served_app(default_plug_boards(), max_body_bytes=MAX_BYTES) as (client, _):
        yield client


def opened(http, key=KEY):
    address = f"ws://{http.base_url.host}:{http.base_url.port}/openenv/crafter/ws"
    headers = {"X-API-Key": key} if key else {}
    return connect(address, additional_headers=headers, proxy=None)


async def told(client, kind, **data):
    await client.send(json.dumps({"type": kind, "data": data}))
    return json.loads(await client.recv())["data"]


@pytest.mark.parametrize("key", ["wrong", None])
async def test_a_handshake_without_a_good_key_is_a_problem_with_status_401(http, key):
    with pytest.raises(InvalidStatus) as refused:
        async with opened(http, key=key):
            pass
    response = refused.value.response
    assert response.status_code == 401
    assert json.loads(response.body)["code"] == "unauthorised"


async def test_a_client_that_dies_leaves_no_session(http):
    async with opened(http) as client:
        env_id = (await told(client, "reset", seed=1))["metadata"]["session_id"]
        assert (await http.get(f"/env/{env_id}/frame")).status_code == 200
        client.transport.abort()  # no closing handshake: what a dying process leaves
    while (await http.get(f"/env/{env_id}/frame")).status_code == 200:
        pass
    assert 'turnwise_sessions{kind="env"} 0.0' in (await http.get("/metrics")).text


async def test_a_message_above_the_bound_closes_the_socket_and_forgets_its_session(http):
    async with opened(http) as client:
        env_id = (await told(client, "reset"))["metadata"]["session_id"]
        with pytest.raises(ConnectionClosed) as closed:
            await told(client, "step", actions=["x" * MAX_BYTES])
        assert closed.value.rcvd.code == 1009
    while (await http.get(f"/env/{env_id}/frame")).status_code == 200:
        pass
