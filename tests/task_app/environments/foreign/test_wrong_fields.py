"""Every field that is read of a foreign server, with every wrong value: the episode fails and names it."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from task_app.protocols import ToolRequest
from tests.service_kit.wrong_replies import Reading, served
from tests.task_app.environments.foreign.contracts import environment

MOVE = {"properties": {"move": {"type": "integer"}}, "required": ["move"]}
CALL = (ToolRequest("step", {"move": 1}, '{"move": 1}'),)
START = {"type": "observation", "data": {"observation": {"at": 0}, "reward": None, "done": False}}


@contextmanager
def openenv(replies: Mapping[str, bytes]) -> Iterator[str]:
    """A server that answers /schema and messages of a type with what this holds at that time."""

    def talk(connection: ServerConnection) -> None:
        for text in connection:
            connection.send(replies[json.loads(text)["type"]])

    def plain(connection: ServerConnection, request: Any) -> Any:
        if request.path != "/schema":
            return None
        response = connection.respond(200, "")
        del response.headers["Content-Length"]
        response.headers["Content-Length"], response.body = str(len(replies["/schema"])), replies["/schema"]
        return response

    with serve(talk, "127.0.0.1", 0, process_request=plain, max_size=None) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"openenv:http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


async def find_faults(
    reading: Reading, name: str, serve: Callable[[bytes], None], **config: Any
) -> list[str]:
    """Play an episode with one call for each wrong reply."""

    def play() -> Any:
        foreign = environment(name, config, environment_deadline_s=30.0)
        try:
            shown = foreign.reset(0)
            return foreign.tools(), shown, foreign.step(CALL)
        finally:
            foreign.close()

    return await reading.find_faults(serve, lambda: asyncio.to_thread(play))


OPENENV: dict[str, tuple[Any, set[str], tuple[str, ...]]] = {
    "/schema": (
        {"action": {"title": "T", "description": "d", **MOVE}},
        {"title", "description"},
        ("action.required", "action.properties.move"),
    ),
    "step": (
        {
            "type": "observation",
            "data": {
                "observation": {"text": "at: 1", "achievements_counts": {"a": -1}, "metadata": None},
                "reward": 0.5,
                "done": True,
            },
        },
        {"reward", "done", "observation", "achievements_counts", "a"},
        ("data.observation.text", "data.observation.metadata"),
    ),
}


@pytest.mark.parametrize("part", OPENENV)
async def test_a_wrong_field_of_an_openenv_server_fails_the_episode_and_is_named(part: str):
    right, optional, data = OPENENV[part]
    replies = {"/schema": json.dumps({"action": MOVE}).encode()}
    replies |= dict.fromkeys(["reset", "step"], json.dumps(START).encode())
    with openenv(replies) as name:
        reading = Reading("openenv:", right, frozenset(optional), data)
        faults = await find_faults(reading, name, lambda body: replies.update({part: body}))
    assert faults == [], "\n".join(faults)


TOOL = {"name": "step", "description": "d", "inputSchema": {"type": "object", **MOVE}}
MCP: dict[str, tuple[Any, set[str], tuple[str, ...]]] = {
    "initialize": ({"protocolVersion": "2025-06-18"}, {"protocolVersion"}, ()),
    "tools/list": (
        {"tools": [TOOL]}, {"description", "inputSchema", "properties"},
        ("result.tools.0.inputSchema.required", "result.tools.0.inputSchema.properties.move"),
    ),
    "tools/call": (
        {
            "content": [{"type": "text", "text": "at: 1"}],
            "structuredContent": {"reward": 0.5, "done": True},
            "isError": False,
        },
        {"content", "text", "structuredContent", "reward", "done", "isError", "result"},
        (),
    ),
}  # fmt: skip


@pytest.mark.parametrize("method", MCP)
async def test_a_wrong_field_of_an_mcp_server_fails_the_episode_and_is_named(method: str):
    right, optional, data = MCP[method]
    replies = {name: json.dumps({"result": result}).encode() for name, (result, *_) in MCP.items()}
    with served(replies) as url:
        reading = Reading("mcp:", {"result": right}, frozenset(optional), data)
        faults = await find_faults(
            reading, f"mcp:{url}/mcp", lambda body: replies.update({method: body}), task="Go."
        )
    assert faults == [], "\n".join(faults)


ANSWER = {"text": "t", "data": {"a": 1}, "reward": 0.5, "terminated": True, "truncated": False, "refused": ""}


async def test_a_wrong_field_of_a_process_fails_the_episode_and_is_named(tmp_path: Path):
    answer, stub = tmp_path / "answer", tmp_path / "python"
    stub.write_text(
        '#!/bin/sh\necho \'{"ready": []}\'\nread line\necho \'{"prompt": "Go."}\'\nread line\n'
        f"cat {answer}\nread line\n"
    )
    stub.chmod(0o755)

    def play() -> Any:
        foreign = environment(
            "verifiers:v", environment_deadline_s=30.0, verifiers_python=str(stub), verifiers_modules=("v",)
        )
        try:
            return foreign.reset(0), foreign.answer("words")
        finally:
            foreign.close()

    reading = Reading("verifiers:v", [ANSWER], frozenset({*ANSWER, "a"}), ("0.data.a",))
    faults = await reading.find_faults(
        lambda body: answer.write_bytes(body + b"\n"), lambda: asyncio.to_thread(play)
    )
    assert faults == [], "\n".join(faults)
