"""Content that could not be stored is refused on every route before the route reads it."""

import json

import pytest
from starlette.testclient import TestClient

from shared_schemas.problem import Problem
from task_app.app import create_app
from task_app.settings import Settings
from tests.task_app.counting import KEY, boards, openapi, rollout

JSON = {"Content-Type": "application/json"}
UNFIT = {
    "half a character": rb'"\ud83d"',
    "half a character in bytes": b'"\xed\xa0\xbd"',
    "NUL": rb'"\u0000"',
    "NUL in a key": rb'{"\u0000": 1}',
    "NaN": b"NaN",
    "a float's overflow": b"[1e999]",
    "an int's overflow": b"1" + b"0" * 400,
    "depth": b"[" * 300 + b"]" * 300,
}


@pytest.fixture(scope="module")
def client():
    app = create_app(Settings(api_keys=(KEY,)), boards=boards())
    with TestClient(app, headers={"X-API-Key": KEY}, raise_server_exceptions=False) as client:
        yield client


def refused(answer):
    problem = Problem.model_validate_json(answer.content)
    return (answer.headers["content-type"], answer.status_code, problem.code, problem.where) == (
        "application/problem+json", 422, "invalid_request", "body",
    )  # fmt: skip


def test_every_route_with_a_body_refuses_it_and_wherever_it_stands(client):
    posts = [path for path, methods in openapi().document["paths"].items() if "post" in methods]
    # A model call of a capture is refused in the form of its dialect.
    paths = [path for path in posts if not path.startswith("/captures/{capture_id}/v1/")]
    assert len(paths) > 25
    tries = [(path, b'{"x": NaN}') for path in paths]
    for value in UNFIT.values():
        inside = (b'{"x": ' + value + b"}", b'{"a": {"b": [1, ' + value + b"]}}")
        tries += [(path, content) for path in ("/env/create", "/rollouts") for content in inside]
    for path, content in tries:
        answer = client.post(path, content=content, headers=JSON)
        assert refused(answer), (path, content, answer.text)


def test_another_content_type_is_no_way_around_it(client):
    for kind in ("application/problem+json", "APPLICATION/JSON; charset=utf-8"):
        answer = client.post(
            "/env/create", content=rb'{"env_name": "\ud83d"}', headers={"Content-Type": kind}
        )
        assert refused(answer)
    answer = client.post(
        "/env/create", content=rb'{"env_name": "\ud83d"}', headers={"Content-Type": "text/plain"}
    )
    assert answer.status_code == 422
    assert "send it as JSON" in answer.json()["detail"]


def test_nul_in_an_address_is_refused(client):
    for method, address, where in (
        ("GET", "/rollouts/a%00b", "path"),
        ("DELETE", "/rollouts/%00", "path"),
        ("GET", "/env/%00/frame", "path"),
        ("POST", "/openenv/%00/reset", "path"),
        ("GET", "/rollouts?run_id=%00", "query"),
        ("GET", "/task_info?env_name=a%00", "query"),
    ):
        answer = client.request(method, address)
        assert (answer.status_code, answer.json()["where"]) == (422, where), address


def test_bytes_of_a_path_that_are_no_text_lead_nowhere(client):
    assert client.get("/rollouts/%ED%A0%BD").status_code == 404


def test_the_place_of_a_value_is_said(client):
    body = json.dumps({"rollouts": [rollout("a", ground_truth={"answer": ["x", "@"]})]})
    answer = client.post("/rollouts", content=body.replace("@", r"\u0000"), headers=JSON)
    assert answer.json()["detail"].startswith("rollouts.0.ground_truth.answer.1 holds U+0000")


def test_the_id_of_an_mcp_request_is_a_text_or_a_number(client):
    for call_id in ({}, [], True):
        body = {"jsonrpc": "2.0", "id": call_id, "method": "tools/list"}
        answer = client.post("/openenv/counting/mcp", json=body).json()
        assert (answer["id"], answer["error"]["code"]) == (None, -32600), call_id


def test_a_frame_of_a_socket_is_read_in_the_same_way(client):
    with client.websocket_connect("/openenv/counting/ws") as socket:
        for value in UNFIT.values():
            socket.send_bytes(b"")
            assert json.loads(socket.receive_text())["data"]["code"] == "INVALID_JSON"
            socket.send_text('{"type": "reset", "data": {"x": ' + value.decode("latin-1") + "}}")
            code = json.loads(socket.receive_text())["data"].get("code")
            # Its bytes, as the letters that they are here, are text like any other.
            assert code == ("INVALID_JSON" if value.isascii() else None)
