"""Every field that is read of a foreign server, with every wrong value: the episode fails and names it."""

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from task_app.environments.foreign.configs import McpConfig
from task_app.environments.foreign.library_peer import LibraryPeer
from task_app.environments.foreign.mcp_links import ProcessLink
from task_app.environments.foreign.mcp_peer import McpPeer
from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import Call
from task_app.settings import Reach
from tests.service_kit.wrong_replies import Reading, served
from tests.task_app.environments.foreign.contracts import environment
from tests.task_app.environments.foreign.test_bad_servers import CALL, MOVE, SCHEMA, START, openenv


def replying(replies: Mapping[str, bytes]) -> AbstractContextManager[str]:
    """A server that answers /schema and messages of a type with what this holds at that time."""
    step, reset = (lambda connection, kind=kind: connection.send(replies[kind]) for kind in ("step", "reset"))
    return openenv(step, lambda: replies["/schema"], reset)


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
    replies = {"/schema": SCHEMA}
    replies |= dict.fromkeys(["reset", "step"], json.dumps(START).encode())
    with replying(replies) as name:
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
    _, optional, data = MCP[method]
    answers = {
        name: {"id": number, "result": result} for number, (name, (result, *_)) in enumerate(MCP.items(), 1)
    }
    replies = {name: json.dumps(answer).encode() for name, answer in answers.items()}
    with served(replies) as url:
        reading = Reading("mcp:", answers[method], frozenset(optional), data)
        faults = await find_faults(
            reading, f"mcp:{url}/mcp", lambda body: replies.update({method: body}), task="Go."
        )
    assert faults == [], "\n".join(faults)


@contextmanager
def stub(folder: Path) -> Iterator[tuple[Path, Callable[[str, Any], None]]]:
    """A program, which prints one answer first, and then another one for each line that it reads."""
    program, first, then = folder / "program", folder / "first", folder / "then"

    def write(name: str, answer: Any) -> None:
        """Write an answer to a new file: the one before may still be read."""
        body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        (folder / "new").write_bytes(body + b"\n")
        (folder / "new").rename(folder / name)

    program.write_text(f"#!/bin/sh\ncat {first}\nwhile read line; do cat {then}; done\n")
    program.chmod(0o755)
    first.touch()
    yield program, write


async def test_a_wrong_field_of_an_mcp_process_fails_the_episode_and_is_named(tmp_path: Path):
    right, optional, _ = MCP["tools/call"]
    with stub(tmp_path) as (program, write):
        reach = Reach(environment_deadline_s=5.0)
        peer = McpPeer("mcp:child", lambda: link, McpConfig())
        peer._link = link = ProcessLink("mcp:child", McpServer(command=str(program)), reach)

        def ask() -> Any:
            peer._count = 6
            return [*peer.carry_out([Call("step", {"move": 1})])]

        whole = {"jsonrpc": "2.0", "id": 7, "result": right}
        reading = Reading("mcp:child", whole, frozenset({*optional, "jsonrpc"}), ("jsonrpc",))
        faults = await reading.find_faults(lambda body: write("then", body), lambda: asyncio.to_thread(ask))
        peer.close()
    assert faults == [], "\n".join(faults)


OFFERED = {"name": "move", "description": "d", "parameters": {}}
WORLD = {"tools": [OFFERED], "prompt": "Go.", "system": "s"}
ANSWER = {"text": "t", "data": {"a": 1}, "reward": 0.5, "terminated": True, "truncated": False, "refused": ""}
LIBRARY = {
    "ready": Reading("verifiers:v", {"ready": []}, frozenset({"ready"})),
    "opening": Reading("verifiers:v", WORLD, frozenset({"system"})),
    "answer": Reading("verifiers:v", [ANSWER], frozenset({*ANSWER, "a"}), ("0.data.a",)),
}


@pytest.mark.parametrize("line", LIBRARY)
async def test_a_wrong_field_of_a_librarys_process_fails_the_episode_and_is_named(line: str, tmp_path: Path):
    with stub(tmp_path) as (program, write):
        reach = Reach(environment_deadline_s=5.0, verifiers_python=str(program))
        peer = LibraryPeer("verifiers", "v", {}, reach)

        def open_and_close() -> Any:
            one = LibraryPeer("verifiers", "v", {}, reach)
            try:
                return one.open()
            finally:
                one.close()

        asks = {"ready": open_and_close, "opening": lambda: peer.reset(0), "answer": lambda: peer.say("w")}
        write("first", {"ready": [OFFERED]})
        write("then", [])
        peer.open()
        file = "first" if line == "ready" else "then"
        faults = await LIBRARY[line].find_faults(
            lambda body: write(file, body), lambda: asyncio.to_thread(asks[line])
        )
        peer.close()
    assert faults == [], "\n".join(faults)
