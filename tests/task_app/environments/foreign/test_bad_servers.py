"""Foreign servers that misbehave: the rollout fails with a reason, and is never scored."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import ForeignDeadline, ForeignFailed
from task_app.errors import EpisodeOver, HostNotAllowed, InvalidRequest
from task_app.protocols import ToolRequest
from tests.task_app.counting import PlannedPolicy, boards, rollout, running_app
from tests.task_app.environments.foreign.contracts import environment
from tests.task_app.rollout_client import accept, wait_for_all

MOVE = {"properties": {"move": {"type": "integer"}}, "required": ["move"]}
SCHEMA = json.dumps({"action": MOVE}).encode()
START = {"type": "observation", "data": {"observation": {"at": 0}, "reward": None, "done": False}}
CALL = (ToolRequest("step", {"move": 1}, '{"move": 1}'),)

Answer = Callable[[ServerConnection], None]


def says(reply: Any) -> Answer:
    return lambda connection: connection.send(reply if isinstance(reply, str) else json.dumps(reply))


def paid(reward: Any, **observation: Any) -> dict[str, Any]:
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": False}}


@contextmanager
def openenv(
    step: Answer,
    schema: Callable[[], bytes] = lambda: SCHEMA,
    reset: Answer = says(START),  # noqa: B008
) -> Iterator[str]:
    """A server that speaks OpenEnv as far as its first step."""

    def talk(connection: ServerConnection) -> None:
        for text in connection:
            {"reset": reset, "step": step}[json.loads(text)["type"]](connection)

    def plain(connection: ServerConnection, request: Any) -> Any:
        if request.path != "/schema":
            return None
        response = connection.respond(200, "")
        response.body = schema()
        del response.headers["Content-Length"]
        response.headers["Content-Length"] = str(len(response.body))
        return response

    with serve(talk, "127.0.0.1", 0, process_request=plain, max_size=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"openenv:http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


BAD = {
    "hangs": (lambda connection: None, "did not answer within 2 s"),
    "closes": (lambda connection: connection.close(), "closed its socket in mid-episode"),
    "large": (says("x" * 100_000_000), "answered more than 10000 bytes"),
    "broken": (
        says({"type": "error", "data": {"code": "EXECUTION_ERROR", "message": "oh"}}),
        "answered EXECUTION_ERROR to step: oh",
    ),
}


def fails_and_is_left(name: str, opening: str, sentence: str, config: Any = None, **reach: Any) -> None:
    """Its first call fails its episode with this reason; another episode can be begun."""
    kind, deadline_s = (ForeignDeadline, 2.0) if "within 2 s" in sentence else (ForeignFailed, 20.0)
    bounds = {"environment_deadline_s": deadline_s, "max_environment_bytes": 10_000}
    foreign = environment(name, config, **bounds, **reach)
    assert foreign.reset(0).text == opening
    with pytest.raises(kind) as failed:
        foreign.step(CALL)
    assert sentence in failed.value.detail
    with pytest.raises(EpisodeOver):
        foreign.step(CALL)
    assert foreign.reset(1).text == opening
    foreign.close()


@pytest.mark.parametrize("how", BAD)
def test_a_server_that_misbehaves_in_mid_episode_fails_it_and_is_left(how):
    step, sentence = BAD[how]
    with openenv(step) as name:
        fails_and_is_left(name, "at: 0", sentence)


def test_an_action_that_the_server_refuses_is_a_no_op():
    refusal = {"type": "error", "data": {"code": "VALIDATION_ERROR", "message": "no such move"}}
    with openenv(says(refusal)) as name:
        foreign = environment(name)
        foreign.reset(0)
        outcome = foreign.step(CALL)
        assert (outcome.env_rewards, outcome.executed_actions) == ((0.0,), ("noop",))
        assert "no such move" in outcome.invalid_reason
        foreign.close()


@pytest.mark.parametrize(
    ("move", "sentence"),
    [
        ({"type": "nonsense"}, "the schema of tool 'step' is none"),
        ({"$ref": "http://127.0.0.1:1/secret"}, "refers to what it does not define"),  # and is never fetched
        ({"$ref": "#/properties/move"}, "the schema of tool 'step' cannot be applied: "),
    ],
)
def test_a_bad_schema_fails_the_episode_and_is_no_mistake_of_the_model(move, sentence):
    schema = json.dumps({"action": {"properties": {"move": move}}})
    with openenv(says(START), schema.encode) as name, pytest.raises(ForeignFailed, match=sentence):
        foreign = environment(name)
        foreign.reset(0)
        foreign.step((ToolRequest("step", {"move": "up"}, '{"move": "up"}'),))


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("openenv:http://169.254.169.254/latest", HostNotAllowed),
        ("mcp:https://example.org/mcp", HostNotAllowed),
        ("mcp:http://user:secret@localhost/mcp", InvalidRequest),
        ("openenv:file:///etc/passwd", InvalidRequest),
        ("openenv:localhost", InvalidRequest),
    ],
)
def test_a_request_names_no_host_beyond_the_operators_list(name, kind):
    with pytest.raises(kind) as refused:
        environment(name)
    assert refused.value.where == "env_name"


class Mcp(BaseHTTPRequestHandler):
    """A server that speaks MCP as far as its first call.

    Attributes:
        over: when the test ends, until which a handler may hang.
        keys: the header X-Key of each request.
    """

    over: threading.Event
    keys: list[str | None]
    call: "McpAnswer"
    leave: "McpAnswer"

    def do_POST(self) -> None:
        self.keys.append(self.headers["x-key"])
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        results = {"tools/list": {"tools": [{"name": "step", "inputSchema": {"type": "object", **MOVE}}]}}
        if asked["method"] == "tools/call":
            self.call(asked["id"])
        else:
            self.answers(message(asked.get("id"), results.get(asked["method"], {})))

    def do_DELETE(self) -> None:
        self.keys.append(self.headers["x-key"])
        self.leave(None)

    def answers(self, text: str, *, kind: str = "application/json") -> None:
        self.begins(kind, len(text))
        self.wfile.write(text.encode())

    def begins(self, kind: str, length: int | None = None) -> None:
        self.send_response(200)
        self.send_header("mcp-session-id", "one")
        self.send_header("content-type", kind)
        if length is not None:
            self.send_header("content-length", str(length))
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        pass


McpAnswer = Callable[[Mcp, Any], None]
EVENTS = "text/event-stream"


def message(request_id: Any, result: Any) -> str:
    return json.dumps({"jsonrpc": "2.0", "id": request_id, "result": result})


def results_in(result: Any) -> McpAnswer:
    return lambda handler, request_id: handler.answers(message(request_id, result))


def pays(reward: Any) -> McpAnswer:
    content = [{"type": "text", "text": "at: 1"}]
    return results_in({"content": content, "structuredContent": {"reward": reward}})


def hangs(handler: Mcp, request_id: Any) -> None:
    handler.over.wait(60)


def only_pings(handler: Mcp, request_id: Any) -> None:
    """Something comes all the time, and never the answer."""
    handler.begins(EVENTS)
    with suppress(OSError):
        while not handler.over.wait(0.05):
            handler.wfile.write(b": ping\n\n")


def closes_in_the_middle(handler: Mcp, request_id: Any) -> None:
    handler.begins("application/json", 100)
    handler.wfile.write(b'{"jsonrpc"')


def a_byte_too_much(handler: Mcp, request_id: Any) -> None:
    handler.answers(message(request_id, {}).ljust(10_001))


@contextmanager
def mcp(
    call: McpAnswer,
    leave: McpAnswer = results_in({}),  # noqa: B008
    keys: list[str | None] | None = None,
) -> Iterator[str]:
    answers = {"call": call, "leave": leave}
    handler = type(
        "Served", (Mcp,), {**answers, "over": threading.Event(), "keys": [] if keys is None else keys}
    )
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        try:
            yield f"mcp:http://127.0.0.1:{server.server_address[1]}/mcp"
        finally:
            handler.over.set()
            server.shutdown()


BAD_MCP: dict[str, tuple[McpAnswer, str]] = {
    "hangs": (hangs, "did not answer within 2 s"),
    "only_pings": (only_pings, "did not answer within 2 s"),
    "closes_in_the_middle": (closes_in_the_middle, "peer closed connection"),
    "ends_its_events": (lambda handler, _: handler.answers(": ping\n\n", kind=EVENTS), "no JSON"),
    "a_byte_too_much": (a_byte_too_much, "answered more than 10000 bytes"),
    "events_of_another": (
        lambda handler, _: handler.answers(f"data: {message(True, {})}\n\n", kind=EVENTS),
        "the answer to tools/call: id is True (bool); it should be 3, that of the request",
    ),
    "pays_twice": (
        results_in({"content": [{"type": "text", "text": '{"reward": 0, "reward": 9}'}]}),
        "the text of a result that pays: the key 'reward' comes twice",
    ),
    "nan_in_its_text": (
        results_in({"content": [{"type": "text", "text": '{"reward": NaN}'}]}),
        "reward is nan (float); it should be a finite number",
    ),
}


@pytest.mark.parametrize("how", BAD_MCP)
def test_an_mcp_server_that_misbehaves_in_mid_call_fails_the_episode_and_is_left(how):
    call, sentence = BAD_MCP[how]
    with mcp(call) as name:
        fails_and_is_left(name, "Go.", sentence, {"task": "Go."})


def test_a_server_at_a_url_of_the_operators_file_gets_its_headers_and_no_error_tells_either():
    keys: list[str | None] = []
    says = {
        "mcp:far answered 403 to POST": lambda said, _: None,
        "mcp:far answered an error to tools/call: -32001": lambda said, _: json.dumps(
            {"error": {"code": -32001, "message": said}}
        ),
        "mcp:far, the answer to tools/call: a field is wrong; it should be an object": lambda said, _: (
            json.dumps([said])
        ),
        "mcp:far, the answer to tools/call: a field is wrong; it should be a valid string": (
            lambda said, request_id: message(request_id, {"content": [{"text": [said]}]})
        ),
        "mcp:far, what a call of step pays: a field is wrong; it should be a valid number": (
            lambda said, request_id: message(request_id, {"structuredContent": {"reward": said}})
        ),
        "mcp:far answered no JSON": lambda said, _: said,
    }
    answers = iter(says.values())

    def refuses(handler: Mcp, request_id: Any) -> None:
        said = f"{handler.headers['host']}{handler.path} {handler.headers['x-key']}"
        text = next(answers)(said, request_id)
        if text is None:
            handler.send_error(403, said, said)
        else:
            handler.answers(text)

    with mcp(refuses, keys=keys) as name:
        url = name.removeprefix("mcp:")
        servers = {"far": McpServer(url=url, headers={"X-Key": "secret"})}
        foreign = environment("mcp:far", allowed_environment_hosts=(), mcp_servers=servers)
        for sentence in says:
            foreign.reset(0)
            with pytest.raises(ForeignFailed) as failed:
                foreign.step(CALL)
            assert str(failed.value) == sentence
        foreign.close()
    assert keys == ["secret"] * 5 * 6, "initialize, initialized, tools/list, tools/call and the end"
    # No server answers at these addresses.
    for place, error in ((url, "ConnectError"), ("http://999.1.1.1/mcp", "InvalidURL")):
        with pytest.raises(ForeignFailed) as failed:
            environment("mcp:far", mcp_servers={"far": McpServer(url=place)}).reset(0)
        assert str(failed.value) == f"mcp:far: {error}"


@pytest.mark.parametrize(
    ("result", "reward", "ends"),
    [
        ({"content": [{"type": "text", "text": '{"reward": 0.5, "done": true}'}]}, 0.5, True),
        ({"content": [{"type": "text", "text": "{reward}"}]}, 0.0, False),
        ({"content": [{"type": "text", "text": '{"task": "x", "done": true}'}]}, 0.0, False),
        ({"content": [{"type": "text", "text": '{"reward": "sword"}'}]}, 0.0, False),
        ({"content": [{"type": "text", "text": '{"reward": 1}'}], "_meta": {"reward": 2}}, 2.0, False),
    ],
)
def test_the_reward_of_a_tool_without_an_output_schema_stands_in_its_text(result, reward, ends):
    with mcp(results_in(result)) as name:
        foreign = environment(name)
        foreign.reset(0)
        outcome = foreign.step(CALL)
        assert (outcome.env_rewards, outcome.terminated) == ((reward,), ends)
        foreign.close()


async def test_a_rollout_in_a_bad_server_fails_with_its_reason_and_earns_nothing():
    answers = iter([pays(1.0), closes_in_the_middle])
    move = {"type": "tool_call", "name": "step", "arguments": {"move": 1}}
    with mcp(lambda handler, request_id: next(answers)(handler, request_id)) as name:
        env = {"env_name": name, "config": {"prompts": "fresh"}}
        async with running_app(boards(act=lambda: PlannedPolicy(move))) as client:
            await accept(client, rollout("bad", env=env, policy={"policy_name": "act"}))
            bad = (await wait_for_all(client, 1))["bad"]
    assert (bad.status, bad.trajectory) == ("failed", None)
    assert (bad.failure.code, bad.failure.decisions_done) == ("foreign_environment_failed", 1)


def test_an_mcp_server_that_hangs_when_it_is_left_delays_no_caller():
    has_left, waits_for_ever = threading.Event(), threading.Event()

    def leave(handler: Mcp, request_id: Any) -> None:
        if not has_left.wait(20):
            waits_for_ever.set()

    with mcp(pays(0.0), leave) as name:
        foreign = environment(name, environment_deadline_s=600.0)
        foreign.reset(0)
        foreign.close()
        has_left.set()
        assert not waits_for_ever.is_set()
