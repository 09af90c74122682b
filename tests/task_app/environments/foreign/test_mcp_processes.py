"""MCP servers that are processes: how they end, what they are given, and those that misbehave."""

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from service_kit.output import MAX_LOG_BYTES
from task_app.environments.foreign.child import end_all
from task_app.environments.foreign.mcp_servers import McpServer
from task_app.environments.foreign.peer import ForeignDeadline, ForeignFailed
from task_app.errors import InvalidRequest
from task_app.protocols import Environment, ToolRequest
from tests.task_app.environments.foreign.contracts import environment
from tests.task_app.environments.foreign.test_bad_servers import CALL, fails_and_is_left


def child(how: str, *arguments: str) -> dict[str, McpServer]:
    """The server `child` of a process that answers its first call so."""
    command = (str(Path(__file__).with_name("mcp_child.py")), how, *arguments)
    return {"child": McpServer(command=sys.executable, args=command)}


def paid_once(servers: dict[str, McpServer], **reach: Any) -> Environment:
    """An episode in that process, whose first call paid 1."""
    foreign = environment("mcp:child", mcp_servers=servers, **reach)
    foreign.reset(0)
    assert foreign.step(CALL).env_rewards == (1.0,)
    return foreign


BAD_CHILD = {
    "hangs": "did not answer within 2 s",
    "only_tells": "did not answer within 2 s",
    "closes": "has ended its process",
    "large": "answered more than 10000 bytes",
    "did_not_read": "what?",
}


@pytest.mark.parametrize("how", BAD_CHILD)
def test_an_mcp_process_that_misbehaves_in_mid_call_fails_the_episode_and_is_left(how):
    fails_and_is_left("mcp:child", "Go.", BAD_CHILD[how], {"task": "Go."}, mcp_servers=child(how))


def test_an_mcp_process_that_reads_no_more_has_no_longer_than_any_other():
    foreign = paid_once(child("reads_no_more"), environment_deadline_s=2.0)
    large = "x" * 1_000_000  # more than a pipe holds
    with pytest.raises(ForeignDeadline, match="did not answer within 2 s"):
        foreign.step((ToolRequest("step", {"move": large}, json.dumps({"move": large})),))
    foreign.close()


@pytest.mark.parametrize("how", ["goes_at_a_signal", "ignores_a_signal"])
def test_the_end_of_the_service_tells_a_process_amid_a_call_that_hangs_to_end_and_kills_it(how, tmp_path):
    file = tmp_path / "left"
    foreign = paid_once(child(how, str(file)), environment_deadline_s=60.0)
    with ThreadPoolExecutor(1) as pool:
        step = pool.submit(foreign.step, CALL)
        end_all(1.0)
        with pytest.raises(ForeignFailed, match="has ended its process"):
            step.result(20)
    foreign.close()
    assert file.exists() == (how == "goes_at_a_signal")


def test_an_mcp_process_has_its_entrys_variables_and_folder_and_no_key_of_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("ENVIRONMENT_API_KEY", "secret")
    folder = str(tmp_path.resolve())
    server = child("shows")["child"].model_copy(update={"cwd": folder, "env": {"HERE": folder}})
    paid_once({"child": server}).close()


@pytest.mark.parametrize(
    ("how", "last"),
    [("asks", "left"), ("goes_at_a_signal", "told")],
    ids=["it may ask and tell in mid-call", "it outlives its stdin, and is told before it is killed"],
)
def test_an_mcp_process_ends_by_itself_or_by_a_signal(how, last, tmp_path):
    file = tmp_path / "left"
    foreign = paid_once(child(how, str(file)))
    assert not file.exists()
    foreign.close()
    assert file.read_text() == last


def test_an_mcp_process_that_floods_its_stderr_is_drained_into_the_log_up_to_a_bound():
    with capture_logs() as logs:
        paid_once(child("floods")).close()
    assert {entry["environment"] for entry in logs} == {"mcp:child"}
    logged = sum(len(entry["text"]) for entry in logs if entry["event"] == "environment_printed")
    (left_out,) = [entry for entry in logs if entry["event"] == "environment_prints_left_out"]
    assert 0 < logged <= MAX_LOG_BYTES and left_out["bytes"] > 19_900_000
    assert left_out["last"].endswith("has paid")


def test_an_mcp_server_of_another_version_is_left_before_it_is_asked_for_anything(tmp_path):
    file = tmp_path / "asked"
    with pytest.raises(ForeignFailed, match="2099-01-01"):
        environment("mcp:child", mcp_servers=child("newer", str(file))).reset(0)
    assert file.read_text() == "initialize", "it is written when its stdin closes"


def test_an_mcp_process_that_does_not_start_is_told_as_such():
    servers = {
        "gone": McpServer(command="/nowhere/server"),
        "dies": McpServer(command="false"),
        "odd": McpServer(command="true", env={"A=B": ""}),
    }
    with pytest.raises(ForeignFailed, match=r"TURNWISE_MCP_SERVERS .*/nowhere"):
        environment("mcp:gone", mcp_servers=servers).reset(0)
    with pytest.raises(ForeignFailed, match="illegal environment variable name"):
        environment("mcp:odd", mcp_servers=servers).reset(0)
    with pytest.raises(ForeignFailed, match="mcp:dies has ended its process"):
        environment("mcp:dies", mcp_servers=servers).reset(0)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("files", "'files' is no URL, and no MCP server"),
        ("off", "MCP server 'off' is disabled"),
        ("none", "MCP server 'none' has neither a command nor a url"),
        ("old", "MCP server 'old' speaks sse"),
    ],
)
def test_a_request_reaches_no_server_beyond_the_operators_file(name, detail):
    servers = {
        "off": child("hangs")["child"].model_copy(update={"disabled": True}),
        "none": McpServer(),
        "old": McpServer(url="https://far.example/mcp", type="sse"),
    }
    with pytest.raises(InvalidRequest) as refused:
        environment(f"mcp:{name}", mcp_servers=servers)
    assert (refused.value.where, detail in refused.value.detail) == ("env_name", True)
    assert "far.example" not in refused.value.detail + refused.value.hint + repr(servers)
